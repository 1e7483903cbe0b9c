"""What a fine-tuning is expected to take follows from its steps, its scorings and its seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overnight.checkpoint.run_corpus import kept_vocabulary
from overnight.finetune import rehearsal as module
from overnight.finetune.rehearsal import finetune_seconds
from tests.finetune.conftest import Task


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a step and a scoring take a second a row, and reading nothing; the batches whose steps were timed."""
    timed: list[int] = []

    def step(run: Any, *rest: Any) -> float:
        ((_, phase),) = run.phases.items()
        timed.append(phase.global_batch_size)
        return float(phase.global_batch_size)

    monkeypatch.setattr(module, "seconds_per_step", step)
    monkeypatch.setattr(module, "_scoring_seconds", lambda workload, examples, *rest: float(len(examples)))
    monkeypatch.setattr(module.time, "perf_counter", lambda: 0.0)
    return timed


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        # 40 rows to train on: 2 epochs of 5 steps of 8 s, 1 s for the network, 20 dev and 12 test rows.
        ({}, 81 + 20 + 12),
        ({"seeds": [0, 1], "random_init_seeds": 1}, 3 * (81 + 20) + 2 * 12),
        # Scored after each epoch, on 20 dev rows.
        ({"keep_best": True, "select_on": "dev"}, 81 + 2 * 20 + 20 + 12),
        # 4 rows are held back of 40: 9 steps, and 4 rows scored twice.
        ({"patience": 1}, 73 + 2 * 4 + 20 + 12),
        # Two trials on 36 rows, 1 epoch of 4 steps and 2 of 9, each scored once; the longer may win.
        ({"search": {"epochs": [1, 2]}}, (4 * 8 + 1 + 4) + (73 + 4) + (73 + 4) + 20 + 12),
        ({"search": {"epochs": [1, 2], "budget": "50s"}}, 50 + (73 + 4) + 20 + 12),
    ],
)
def test_the_time_of_a_task_is_that_of_its_parts(settings: dict[str, Any], seconds: float, with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, **settings)
    assert finetune_seconds(run, "mine", kept_vocabulary(run)[0]) == pytest.approx(seconds)  # type: ignore[arg-type]


def test_a_batch_is_timed_once(with_task: Task, classes: Path, measured: list[int]) -> None:
    run = with_task("csv", classes, search={"lr": [1e-3, 2e-3], "epochs": [1, 2], "global_batch_size": [4, 8]}, micro_batch_size=4)
    finetune_seconds(run, "mine", kept_vocabulary(run)[0])  # type: ignore[arg-type]
    assert measured == [4, 8]
