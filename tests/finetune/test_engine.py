"""A seed of fine-tuning is trained by the engine: it resumes inside, is guarded, and may be shared by processes."""

from __future__ import annotations

import dataclasses
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from overnight import config
from overnight.engine import loop
from overnight.engine.finite import NonFiniteError
from overnight.models.heads import Classifier
from overnight.state_files import sealed_yaml
from tests.finetune.conftest import SPEC, Task
from tests.finetune.test_finetune import Stop, kept, lines, train_lines, tune
from tests.processes import overnight


def test_a_kill_inside_a_seed_continues_from_its_checkpoint_bit_by_bit(
    with_task: Task, classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_task("csv", classes, epochs=2)
    run = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, save_every=1))
    whole = dataclasses.replace(run, out=str(tmp_path / "whole"))
    shutil.copytree(run.run_dir, whole.run_dir)
    tune(whole)
    real, steps = loop.clip_and_step, 0

    def cut(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise Stop
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "clip_and_step", cut)
        with pytest.raises(Stop):
            tune(run)
    assert lines(run) == []
    assert "continuing at step" in tune(run)
    for file in ("model.safetensors", "predictions.json"):
        assert (kept(run) / file).read_bytes() == (kept(whole) / file).read_bytes()
    assert [line["loss"] for line in train_lines(run)] == [line["loss"] for line in train_lines(whole)]
    assert not list((run.run_dir / "finetune" / "mine.training").glob("*/checkpoints")), "a seed that is done needs none"


def test_a_loss_that_is_not_finite_stops_a_seed_or_is_skipped_as_the_run_says(
    with_task: Task, classes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Classifier.losses, 0

    def broken(self: Classifier, batch: Any, dtype: torch.dtype) -> Any:
        nonlocal calls
        calls += self.training
        losses, correct = real(self, batch, dtype)
        return ({"label": losses["label"] * torch.nan} if calls == 3 else losses), correct

    monkeypatch.setattr(Classifier, "losses", broken)
    run = with_task("csv", classes, epochs=2)
    with pytest.raises(NonFiniteError, match=r"phase mine seed 0 pretrained, step .* not finite"):
        tune(run)
    calls = 0
    run = with_task("csv", classes, epochs=2, **{"stability.on_nonfinite": "skip", "logging.log_every": 1})
    shutil.rmtree(run.run_dir / "finetune")
    assert "skipped" in tune(run) and train_lines(run)[-1]["skipped"] == 1


BEST = {"patience": 2, "eval_every": 0.2}
"""The epoch is chosen whose score is best."""


def places(processes: int) -> list[dict[str, Any]]:
    """What the environment of each of some processes says of it, as torchrun sets it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": rank, "LOCAL_RANK": rank, **meeting} for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "chosen"),
    [
        *(pytest.param("ddp", {}, id="last-ddp"), pytest.param("fsdp", BEST, id="best-fsdp")),
        *(
            pytest.param("fsdp", {}, id="last-fsdp", marks=pytest.mark.heavy),
            pytest.param("ddp", BEST, id="best-ddp", marks=pytest.mark.heavy),
        ),
    ],
)
def test_two_processes_tune_as_one_does(strategy: str, chosen: dict[str, float], with_task: Task, classes: Path, tmp_path: Path) -> None:
    run = with_task("csv", classes, epochs=0.5)
    # Each process draws its own dropout.
    whole = dataclasses.replace(run, model=dataclasses.replace(run.model, dropout=0.0, attention_dropout=0.0))  # type: ignore[type-var]
    (run.run_dir / "run.yaml").write_text(sealed_yaml(config.run_yaml(whole)))
    alone = dataclasses.replace(run, out=str(tmp_path / "alone"))
    shutil.copytree(run.run_dir, alone.run_dir)
    words = [
        "finetune",
        "mine",
        "--task=csv",
        f"--path={classes}",
        *(f"--{key}={value}" for key, value in (SPEC | {"epochs": 0.5} | chosen).items()),
    ]
    with ExitStack() as running:
        started = [
            running.enter_context(overnight(*words, "--from", folder, f"--distributed.strategy={strategy}", **place))
            for processes, folder in ((1, alone.run_dir), (2, run.run_dir))
            for place in places(processes)
        ]
        ends = [process.end() for process in started]
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert ["next:" in said for _, said in ends] == [True, True, False], "the first says what came out, once it is written"
    models = [load_file(kept(one) / "model.safetensors") for one in (alone, run)]
    for name in models[0]:
        torch.testing.assert_close(models[0][name], models[1][name], rtol=1e-4, atol=1e-5, msg=name)
    (mine,), (theirs,) = lines(alone), lines(run)
    assert mine["epoch"] == theirs["epoch"] and mine["epochs_trained"] == theirs["epochs_trained"]


@pytest.mark.slow
def test_processes_with_other_settings_are_refused_before_they_train(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes)
    words = ["finetune", "mine", "--from", run.run_dir, "--task=csv", f"--path={classes}", "--seq_len=24"]
    with ExitStack() as running:
        started = [running.enter_context(overnight(*words, f"--lr=0.00{1 + place['RANK']}", **place)) for place in places(2)]
        codes, said = zip(*(process.end() for process in started), strict=True)
    assert codes == (2, 2) and "process 1 does not have what process 0 has" in said[1]
    assert lines(run) == []
