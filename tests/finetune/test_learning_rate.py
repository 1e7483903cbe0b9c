"""Without a learning rate a task takes the one that fits its optimizer and network, and says which."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from overnight.config import Finetune
from overnight.finetune.workload import with_rate
from tests.finetune.conftest import Task
from tests.finetune.test_finetune import kept, tune


@pytest.mark.parametrize(("width", "lr"), [(64, 3e-4), (256, 3e-4), (384, 1.5e-4), (512, 9.7e-5), (768, 5e-5), (1024, 3.1e-5)])
def test_adamw_s_rate_falls_with_the_width(width: int, lr: float) -> None:
    assert with_rate(Finetune(), width).lr == lr


def test_other_optimizers_and_given_rates_do_not_depend_on_the_width() -> None:
    assert {with_rate(Finetune(optimizer=name), width).lr for name in ("muon", "lamb") for width in (128, 1024)} == {1e-3}
    assert with_rate(Finetune(lr=7e-5), 128).lr == 7e-5


def test_it_is_shown_kept_and_the_same_as_when_it_is_given(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, lr=0.0)
    assert "adamw at 0.0003" in tune(run)
    assert json.loads((kept(run) / "task.json").read_text())["spec"]["lr"] == 3e-4
    given = {"mine": dataclasses.replace(run.finetune["mine"], lr=3e-4)}
    assert "done already" in tune(dataclasses.replace(run, finetune=given))
