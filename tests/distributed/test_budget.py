"""A budget on two processes: the first one decides, both end, and the training is that of one process by the same decisions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from overnight.console import Line
from overnight.engine.budget_record import read_record, write_record
from overnight.engine.pretrain import pretrain
from tests.conftest import modern_settings
from tests.distributed.test_parallel import Runs, assert_same_curve, distance, lines


@pytest.mark.parametrize("pairs", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_two_processes_train_by_the_decisions_of_the_first(pairs: bool, tiny_data: Path, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tiny_data)
    optim = {"name": "lamb", "lr": 0.01, "schedule": {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.5, "decay": "sqrt"}}
    # By clocks that only the steps move, of which that of the second process goes faster; the other way by the machine's.
    budget, clock = ("50s", {"clock": [1.0, 1.7]}) if pairs else ("4s", {})
    settings: dict[str, Any] = {"budget": budget, "checkpoint.save_every": 20, "logging.eval_every": 20}
    phase: dict[str, Any] = {"optim": optim}
    if pairs:  # far more steps of them than the budget has: they are left out, in both processes from the same step on
        phase |= {"nsp": False, "token_matching": 1.0, "token_matching_steps": 10**6}
    changes = {"phase": phase, "settings": settings} | ({"model": modern_settings()["model"]} if pairs else {})
    (said,) = runs.on(2, {"recipe": runs.recipe("two", **changes), **clock})
    assert [code for code, _ in said] == [0, 0], said
    two, one = (runs.make(name, **changes) for name in ("two", "one"))
    record = read_record(two)
    assert record is not None and record.done is not None
    assert all(record.of(phase)[-1].decay_begins is not None for phase in ("short", "long"))
    write_record(one, record)
    pretrain(one, Line(io.StringIO()))
    assert read_record(one) == record
    with_pairs = {line["step"] for line in lines(two.run_dir, "train") if "match_loss" in line}
    assert pairs == any("token_matching" in line["event"] for line in lines(two.run_dir, "event")) and len(with_pairs) <= 20 * pairs
    assert_same_curve(two.run_dir, one.run_dir)
    assert distance(two.run_dir, one.run_dir) <= 1e-5
