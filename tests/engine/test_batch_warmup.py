"""A run whose batch warms up: stopped anywhere or cut in any way, it is the same run."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from overnight.batches.batch_size import batch_size, sequences_before
from overnight.batches.lengths import expected_lengths
from overnight.batches.loader import Samples
from overnight.checkpoint import reader
from overnight.checkpoint.reader import TrainingProgress, state_text
from overnight.checkpoint.run_identity import claim_folder
from overnight.config import Run
from overnight.console import Line
from overnight.engine.throughput import Spent, Throughput
from overnight.engine.training_run import TrainingRun
from tests.engine.planted_faults import planted, spike
from tests.engine.test_pretrain import finish

Make = Callable[..., Run]
GROWING = {
    "phases.short.batch_warmup": {"initial_batch_size": 2, "steps": 5},
    "phases.short.optim.scaling": {"rule": "sqrt", "base_batch_size": 2},
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
}
BACK = {"stability.on_nonfinite": "rollback", "checkpoint.save_every": 2, "checkpoint.keep_latest_k": 9}


class Stop(Exception):
    """What stands for a crash."""


def lines(run: Run, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def weights(run: Run) -> dict[str, torch.Tensor]:
    newest = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert newest is not None
    return reader.read_checkpoint(newest)[1]


@pytest.fixture
def undisturbed(tiny: Make, tmp_path: Path) -> tuple[Run, str]:
    run = tiny(**GROWING, out=str(tmp_path / "undisturbed"))
    return run, finish(run)


def test_the_log_has_the_true_batches_and_the_resolved_rate(undisturbed: tuple[Run, str]) -> None:
    run, told = undisturbed
    phase = run.phases["short"]
    train = [line for line in lines(run, "train") if line["phase"] == "short"]
    assert [line["batch"] for line in train] == [batch_size(phase, step) for step in range(6)] == [2, 2, 4, 4, 6, 8]
    assert [line["sequences"] for line in train] == [sequences_before(phase, step) for step in range(1, 7)]
    assert "6 steps of 2 to 8 sequences (4 x 2)" in told and "lamb at 0.02" in told and max(line["lr"] for line in train) == 0.02
    assert all("batch" not in line for line in lines(run, "train") if line["phase"] == "long")


@pytest.mark.parametrize("at", [3, 7, *(pytest.param(at, marks=pytest.mark.heavy) for at in (1, 5))])
def test_a_crash_while_the_batch_warms_up_does_not_change_the_result(at: int, tiny: Make, undisturbed: tuple[Run, str]) -> None:
    run, calls = tiny(**GROWING), 0
    work = TrainingRun(run, Line(io.StringIO()))
    claim_folder(run)

    def losses(batch: Any, dtype: torch.dtype) -> Any:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise Stop
        return work.model.losses(batch, dtype)

    work.objective = losses
    with pytest.raises(Stop):
        work.go()
    finish(run)
    clean, mine = weights(undisturbed[0]), weights(run)
    assert all(torch.equal(mine[name], clean[name]) for name in clean)


@pytest.mark.parametrize("micro_batch_size", [2, *(pytest.param(size, marks=pytest.mark.heavy) for size in (1, 8))])
def test_accumulation_does_not_change_the_training_while_the_batch_warms_up(
    micro_batch_size: int, tiny: Make, undisturbed: tuple[Run, str]
) -> None:
    run = tiny(**GROWING, **{"phases.short.micro_batch_size": micro_batch_size})
    finish(run)
    clean, mine = weights(undisturbed[0]), weights(run)
    for name in clean:
        torch.testing.assert_close(mine[name], clean[name], rtol=1e-4, atol=2e-6, msg=name)


def test_the_time_left_counts_the_true_batches(tiny: Make) -> None:
    run = tiny(**GROWING)
    speed = Throughput(run.phases, 0)
    # Of 26 sequences 4 are done, at one a second; 4 steps of 8 longer sequences follow.
    speed._all = Spent(seconds=4.0, tokens=64, sequences=4)
    longer = expected_lengths(run.phases["long"]).mean / expected_lengths(run.phases["short"]).mean
    assert longer > 1.4 and speed.left(TrainingProgress(step=2)) == pytest.approx({"short": 22.0, "long": 4 * 8 * longer})


def test_after_a_rollback_the_batch_grows_by_the_step_and_its_data_stays_passed_over(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, reference = (tiny(**GROWING, **BACK, out=str(tmp_path / name)) for name in ("run", "reference"))
    with planted(spike(run, 3, factor=float("nan"))):
        finish(run)
    locate = Samples.locate

    def without(self: Samples, positions: np.ndarray) -> Any:
        """The stream of the first phase without the sequences 4 to 11, those of its steps 2 and 3."""
        return locate(self, positions + 8 * (positions >= 4) * (self.seed[1:] == (0, 0)))

    with monkeypatch.context() as patch:
        patch.setattr(Samples, "locate", without)
        finish(reference)
    train = [line for line in lines(run, "train") if line["phase"] == "short"]
    assert [line["batch"] for line in train] == [2, 2, 4, 4, 6, 8] and train[-1]["sequences"] == 26
    mine, clean = weights(run), weights(reference)
    assert all(torch.equal(mine[name], clean[name]) for name in clean)


@pytest.mark.parametrize("counted", [True, False])
def test_a_run_resumes_from_a_checkpoint_after_a_rollback_also_from_before_sequences_were_counted(
    counted: bool, tiny: Make, tmp_path: Path
) -> None:
    # Before they were counted, a batch that grew ran ahead: only one that does not is the same run.
    settings = {**BACK, **(GROWING if counted else {})}
    run, cut = (tiny(**settings, out=str(tmp_path / name)) for name in ("run", "cut"))
    with planted(spike(run, 3, factor=float("nan"))):
        finish(run)
        finish(cut)
    path = cut.run_dir / "checkpoints" / "step-0000004" / "state.json"
    for checkpoint in path.parents[1].iterdir():
        if checkpoint.name > path.parent.name:
            shutil.rmtree(checkpoint)
    state = json.loads(path.read_text())
    assert (state["progress"]["batches_skipped"], state["progress"]["sequences_skipped"]) == (2, 8 if counted else 16)
    if not counted:
        del state["progress"]["sequences_skipped"]
        path.write_text(state_text(state["progress"], {part: digest for part, digest in state["checksums"].items() if part != "progress"}))
    finish(cut)
    mine, clean = weights(cut), weights(run)
    assert all(torch.equal(mine[name], clean[name]) for name in clean)
