"""A budget on two processes: the first one decides, both end, and the training is that of one process by the same decisions."""

from __future__ import annotations

import io
from pathlib import Path

from overnight.console import Line
from overnight.engine.budget_record import read_record, write_record
from overnight.engine.pretrain import pretrain
from tests.distributed.test_parallel import Runs, assert_same_curve, distance


def test_two_processes_train_by_the_decisions_of_the_first(tiny_data: Path, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tiny_data)
    optim = {"name": "lamb", "lr": 0.01, "schedule": {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.5, "decay": "sqrt"}}
    settings = {"budget": "4s", "checkpoint.save_every": 20, "logging.eval_every": 20}
    (said,) = runs.on(2, {"recipe": runs.recipe("two", phase={"optim": optim}, settings=settings)})
    assert [code for code, _ in said] == [0, 0], said
    two, one = (runs.make(name, phase={"optim": optim}, settings=settings) for name in ("two", "one"))
    record = read_record(two)
    assert record is not None and record.done is not None
    assert all(record.of(phase)[-1].decay_begins is not None for phase in ("short", "long"))
    write_record(one, record)
    pretrain(one, Line(io.StringIO()))
    assert read_record(one) == record
    assert_same_curve(two.run_dir, one.run_dir)
    assert distance(two.run_dir, one.run_dir) <= 1e-5
