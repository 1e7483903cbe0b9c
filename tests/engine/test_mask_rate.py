"""A mask rate that falls with the learning rate: the tokens that are predicted, and the bits of a run that is stopped."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight.batches.masking import falling_rate
from overnight.checkpoint import reader
from overnight.checkpoint.run_identity import claim_folder
from overnight.config import Run
from overnight.console import Line
from overnight.engine.pretrain import pretrain
from overnight.engine.training_run import TrainingRun
from overnight.optim.schedules import decay_factors
from tests.conftest import modern_settings

Make = Callable[..., Run]
FALLING = {
    "phases.short.mlm_probability": 0.4,
    "phases.short.final_mlm_probability": 0.1,
    "phases.short.max_predictions_per_seq": 0,
    "phases.short.optim.schedule": {"name": "wsd", "warmup_ratio": 0.2, "stable_ratio": 0.2},
}


class Stop(Exception):
    """What stands for a crash."""


def predicted(run: Run, stop_at: int = -1) -> list[tuple[int, int]]:
    """Train and return the targets of each step of the first phase, with its tokens; a crash may come before a step."""
    work, seen = TrainingRun(run, Line(io.StringIO())), list[tuple[int, int]]()
    claim_folder(run)

    def losses(batch: Any, dtype: torch.dtype) -> Any:
        if len(seen) == stop_at:
            raise Stop
        if work.model.training:  # else it is an evaluation, whose rate never changes
            seen.append((int((batch.targets["mlm"] >= 0).sum()), int((batch.ids_N != 0).sum())))
        return work.model.losses(batch, dtype)

    work.objective = losses
    work.go()
    return seen


def weights(run: Run) -> dict[str, torch.Tensor]:
    newest = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert newest is not None
    return reader.read_checkpoint(newest)[1]


def test_the_share_of_predicted_tokens_falls_with_the_learning_rate(tiny: Make) -> None:
    run = tiny(**FALLING, **{"phases.short.micro_batch_size": 8, "phases.short.nsp": False, "phases.short.short_seq_prob": 0.0})
    phase = run.phases["short"]
    shares = [targets / tokens for targets, tokens in predicted(run)][: phase.steps]
    decay = decay_factors(phase)
    wanted = [0.1 + 0.3 * decay(step) for step in range(phase.steps)]
    assert wanted[:2] == [pytest.approx(0.4)] * 2 and wanted[-1] < 0.25 and sorted(wanted, reverse=True) == wanted
    # The count of a sequence, of 32 tokens at most, is rounded.
    assert [share / shares[0] for share in shares] == pytest.approx([rate / 0.4 for rate in wanted], abs=0.06)


@pytest.mark.parametrize("at", [2, 5])
def test_a_crash_while_the_mask_rate_falls_does_not_change_the_result(at: int, tiny: Make, tmp_path: Path) -> None:
    undisturbed, run = tiny(**FALLING, out=str(tmp_path / "undisturbed")), tiny(**FALLING)
    pretrain(undisturbed, Line(io.StringIO()))
    with pytest.raises(Stop):
        predicted(run, stop_at=2 * at)
    pretrain(run, Line(io.StringIO()))
    clean, mine = weights(undisturbed), weights(run)
    assert all(torch.equal(mine[name], clean[name]) for name in clean)


def test_the_last_step_predicts_no_less_than_the_final_rate() -> None:
    rate = falling_rate(0.3, 0.15, lambda step: 1 - step / 10)
    assert [rate(step) for step in (0, 5, 10)] == pytest.approx([0.3, 0.225, 0.15])


def test_after_a_rollback_mask_rate_and_pairs_are_those_of_the_steps_not_of_the_data_that_was_passed_over(tiny: Make) -> None:
    """Three batches are passed over; of the six steps still the first three have pairs, and all have the rates of an undisturbed run."""
    settings = {**modern_settings(), **FALLING, "phases.short.micro_batch_size": 8, "phases.short.short_seq_prob": 0.0}
    settings |= {"phases.short.token_matching": 1.0, "phases.short.token_matching_steps": 3, "phases.short.final_token_matching": 0.0}
    run = tiny(**settings, **{"stability.on_nonfinite": "rollback", "checkpoint.save_every": 100})
    work, seen = TrainingRun(run, Line(io.StringIO())), list[tuple[bool, float]]()
    claim_folder(run)

    def losses(batch: Any, dtype: torch.dtype) -> Any:
        found, correct = work.model.losses(batch, dtype)
        if work.model.training and "match" in batch.targets:
            share = (batch.targets["mlm"] >= 0).sum() / (batch.ids_N != 0).sum()
            seen.append((bool((batch.targets["match"] >= 0).any()), float(share)))
            if len(seen) == 3:
                found["mlm"] = found["mlm"] * torch.nan
        return found, correct

    work.objective = losses
    work.go()
    again, decay = seen[3:], decay_factors(run.phases["short"])
    assert [pairs for pairs, _ in again] == [True] * 3 + [False] * 3
    assert [share for _, share in again] == pytest.approx([0.1 + 0.3 * decay(step) for step in range(6)], abs=0.03)
