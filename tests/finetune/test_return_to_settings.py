"""A task that is done with other settings or weights in between, or cut off at its very end, ends with the folder that its results speak of."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from overnight.checkpoint.reader import newest_checkpoint, read_checkpoint
from overnight.checkpoint.task_folder import folders_of_tasks
from overnight.checkpoint.writer import write_checkpoint
from overnight.finetune import finetune as module
from overnight.finetune import search as searching
from overnight.run_dir.task_results import read_results
from tests.finetune.conftest import Task
from tests.finetune.test_finetune import tune


class Stop(BaseException):
    """What stands for a kill."""


def test_a_return_to_earlier_settings_that_is_cut_off_does_every_seed_again(
    with_task: Task, classes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = with_task("csv", classes, seeds=[0, 1]), with_task("csv", classes, seeds=[0, 1], lr=1e-3)
    tune(first)
    tune(second)
    real = module._Tuning._seed

    def cut(self: Any, init: str, seed: int, announces: bool) -> None:
        if seed == 1:
            raise Stop
        real(self, init, seed, announces)

    with monkeypatch.context() as patch:
        patch.setattr(module._Tuning, "_seed", cut)
        with pytest.raises(Stop):
            tune(first)
    tune(first)
    found = [entry for entry in read_results(first.run_dir / "tasks.jsonl") if entry["kind"] == "finetune"]
    hashes = [entry["config_hash"] for entry in found]
    assert [entry["seed"] for entry in found] == [0, 1] * 3 and hashes[0] == hashes[4] == hashes[5] != hashes[2]
    best = max(found[4:], key=lambda entry: entry["value"])
    assert json.loads((first.run_dir / "finetune" / "mine" / "task.json").read_text())["result"]["seed"] == best["seed"]
    assert tune(first) == "mine: done already\n"


def test_a_table_that_was_moved_is_done_and_further_seeds_are_added_to_those_before(with_task: Task, classes: Path) -> None:
    tune(with_task("csv", classes))
    moved = classes.rename(classes.with_name("moved"))
    assert tune(with_task("csv", moved)) == "mine: done already\n"
    assert "seed 0 pretrained  acc" not in tune(with_task("csv", moved, seeds=[0, 1]))
    assert tune(with_task("csv", moved.rename(classes), seeds=[0, 1])) == "mine: done already\n"
    found = [entry for entry in read_results(with_task("csv", classes).run_dir / "tasks.jsonl") if entry["kind"] == "finetune"]
    assert [entry["seed"] for entry in found] == [0, 1]


@pytest.mark.parametrize("search", [{}, {"lr": [3e-3, 1e-3]}])
def test_the_checkpoints_of_what_was_recorded_before_a_kill_are_deleted_by_the_next_call(
    search: dict[str, Any], with_task: Task, classes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, owner = with_task("csv", classes, search=search), searching if search else module
    real = owner.append_result

    def cut(log: Any, entry: Any) -> Any:
        if entry["kind"] == "baseline":
            return real(log, entry)
        real(log, entry)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(owner, "append_result", cut)
        with pytest.raises(Stop):
            tune(run)
    left = {place.parent for place in run.run_dir.glob("finetune/*/*/checkpoints")}
    tune(run)
    assert len(left) == 1 and all((folder / "metrics.jsonl").is_file() for folder in left)
    assert not list(run.run_dir.glob("finetune/*/*/checkpoints"))


def test_a_kill_while_an_older_model_is_deleted_leaves_the_newer_one(
    with_task: Task, classes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(with_task("csv", classes))
    run = with_task("csv", classes, lr=1e-3)
    real = module.shutil.rmtree

    def cut(path: Path, **settings: Any) -> None:
        if (path / "task.json").is_file():
            raise Stop
        real(path, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "rmtree", cut)
        with pytest.raises(Stop):
            tune(run)
    folder = run.run_dir / "finetune" / "mine"
    assert json.loads((folder / "task.json").read_text())["spec"]["lr"] == 1e-3
    assert folders_of_tasks(run.run_dir) == [folder] and (folder.parent / ".mine.old" / "task.json").is_file()
    tune(run)
    assert sorted(place.name for place in folder.parent.iterdir()) == ["mine", "mine.training"]


def test_a_checkpoint_of_the_same_step_with_other_weights_is_fine_tuned_anew(with_task: Task, classes: Any) -> None:
    run = with_task("csv", classes)
    tune(run)
    checkpoint = newest_checkpoint(run.run_dir / "checkpoints")
    assert checkpoint is not None
    progress, model, optimizer = read_checkpoint(checkpoint)
    shutil.rmtree(run.run_dir / "checkpoints")
    again = {"model": {name: x * 1.5 for name, x in model.items()}, "optimizer": optimizer}
    write_checkpoint(run.run_dir / "checkpoints", again, dataclasses.asdict(progress))
    assert "seed 0 pretrained" in tune(run) and tune(run) == "mine: done already\n"
