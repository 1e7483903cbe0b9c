"""Spikes are told from noise; a step that is one is skipped, or the run goes back and passes over its data, bit by bit as without it."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.batches.loader import Samples
from overnight.batches.pairs import A_END, A_START
from overnight.checkpoint import reader
from overnight.config import OPTIMIZERS, Run, Stability
from overnight.console import Line
from overnight.engine import loop, stability
from overnight.engine.finite import NonFiniteError
from overnight.engine.precision import LossScale
from overnight.engine.pretrain import pretrain
from overnight.engine.spikes import LEAST, WINDOW, Rollback, Spike, SpikeDetector, largest_gradients
from overnight.optim.groups import build_optimizer
from tests.conftest import ROOT
from tests.engine.planted_faults import planted, samples_of, spike
from tests.engine.test_loop_measurements import work
from tests.engine.test_nonfinite import lines
from tests.engine.test_pretrain import Stop, assert_same_run, finish, metrics, parameters
from tests.models.sample import pretraining
from tests.processes import Process

Make = Callable[..., Run]
CURVES = sorted((ROOT / "benchmarks" / "results").glob("*/metrics.jsonl"))


def values(curve: Path) -> dict[str, list[dict[str, float]]]:
    """What is watched of a stored run, by phase."""
    found: dict[str, list[dict[str, float]]] = {}
    for text in curve.read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "train":
            found.setdefault(line["phase"], []).append({name: line[name] for name in ("loss", "grad_norm")})
    return found


@pytest.mark.parametrize("curve", CURVES, ids=[curve.parent.name for curve in CURVES])
def test_stored_runs_have_no_spike_and_planted_ones_are_found(curve: Path) -> None:
    judged = found = 0
    for points in values(curve).values():
        spike_detector = SpikeDetector(Stability.spike_threshold, {})
        for point in points:
            assert spike_detector.spike(point) == ""
            if len(spike_detector.window.get("loss", [])) >= LEAST:
                judged += 1
                found += bool(spike_detector.spike({**point, "loss": 2 * point["loss"]}))
                assert spike_detector.spike({**point, "loss": 6 * point["loss"]}).startswith("the loss is ")
                assert spike_detector.spike({**point, "grad_norm": 1000 * point["grad_norm"]}).startswith("the gradient norm is ")
            spike_detector.note(point)
    assert judged > 50 and found > 0.8 * judged, (judged, found)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(0, 0.5), st.floats(-0.02, 0.02), st.floats(1e-6, 1e6))
def test_normal_noise_of_any_size_and_any_steady_slope_is_no_spike(seed: int, noise: float, slope: float, level: float) -> None:
    rng, spike_detector = random.Random(seed), SpikeDetector(Stability.spike_threshold, {})
    for step in range(300):
        point = {"loss": level * math.exp(slope * step + noise * rng.gauss(0, 1))}
        assert spike_detector.spike(point) == ""
        spike_detector.note(point)
    assert spike_detector.spike({"loss": point["loss"] * math.exp(40 * noise + 1000 * abs(slope) + 0.2)})


def test_noise_with_heavy_tails_is_taken_for_a_spike_less_than_once_in_five_thousand_steps() -> None:
    rng, watch, alarms = random.Random(0), SpikeDetector(Stability.spike_threshold, {}), 0
    for _ in range(20_000):
        point = {"loss": math.exp(0.5 * rng.choice((-1, 1)) * rng.expovariate(math.sqrt(2)))}
        alarms += bool(watch.spike(point))
        watch.note(point)
    assert alarms <= 4, alarms


def test_nothing_is_judged_at_first_nor_by_a_window_of_other_steps() -> None:
    window: dict[str, list[float]] = {}
    spike_detector = SpikeDetector(10.0, window)
    for _ in range(LEAST):
        assert spike_detector.spike({"loss": 1e9}) == ""
        spike_detector.note({"loss": 2.0, "grad_norm": math.nan})
    assert spike_detector.spike({"loss": 1e9}) and not spike_detector.spike({"loss": math.inf}) and not spike_detector.spike({"loss": 2.1})
    assert SpikeDetector(10.0, window).spike({"loss": 1e9})
    assert not SpikeDetector(10.0, window, every=5).spike({"loss": 1e9}) and window == {"every": [5.0]}


def test_a_level_that_stays_is_said_once_and_then_is_the_usual() -> None:
    spike_detector = SpikeDetector(10.0, {})
    said = [spike_detector.first({"loss": loss}) for loss in [1.0] * WINDOW + [9.0] * WINDOW + [100.0]]
    assert [at for at, text in enumerate(said) if text] == [WINDOW, 2 * WINDOW]


def test_the_tensors_that_carry_a_gradient_are_named_with_their_usual_share() -> None:
    for name in ("lamb", "adamw", "lans", "lars"):
        model = pretraining()
        optimizer = build_optimizer(model, OPTIMIZERS[name](lr=1e-3))  # type: ignore[arg-type]
        for step in range(2):
            for batch in work(step).micro:
                losses, _ = model.losses(batch, torch.float32)
                (losses["mlm"] + losses["nsp"]).backward()
            if step == 0:
                loop.clip_and_step(optimizer, 1.0)
                optimizer.zero_grad()
        with torch.no_grad():
            model.pooler.weight.grad.fill_(1e3)
        told = largest_gradients(optimizer)
        assert told.startswith("most of the gradient is in pooler.weight (100.0 % of it")
        assert (", usually " in told) == (name in ("lamb", "adamw"))


def test_a_spike_whose_gradient_overflows_names_its_tensors() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model.weight.grad, model.bias.grad = torch.full((1, 2), math.inf), torch.ones(1)
    assert largest_gradients(optimizer) == "the gradient of weight is not finite"


def test_the_samples_of_a_micro_batch_are_found_in_the_shards(tiny: Make) -> None:
    samples = samples_of(tiny())
    for step, number in ((0, 1), (30, 0), (500, 1)):
        found, dealt = samples.provenance(step, 2, number), samples.step_samples(step, 2)
        micro = samples.step(step, rank=number % 2, world=2).micro[number // 2]
        assert len(found) == len(micro.lengths)
        same = []
        for at, source in enumerate(found):
            (shard,) = (s for s in samples.shards if s.name == source["shard"])
            first, last = shard.document_sentences[source["row"] : source["row"] + 2]
            row = dealt.rows[dealt.bins[number][at]]
            assert shard.sentence_starts[first] <= row[A_START] < row[A_END] <= shard.sentence_starts[last]
            inside = micro.ids_N[micro.starts[at] + 1 : micro.starts[at] + 1 + row[A_END] - row[A_START]]
            same.append(inside == torch.from_numpy(shard.tokens[row[A_START] : row[A_END]].astype("int64")))
        assert torch.cat(same).float().mean() > 0.7  # the rest is masked


def long_run(tiny: Make, **changes: Any) -> Run:
    """14 and 4 steps with a checkpoint every fourth."""
    base = {
        "phases.short.steps": 14,
        "checkpoint.save_every": 4,
        "logging.eval_every": 8,
        "checkpoint.keep_latest_k": 10,
        "stability.spike_threshold": 30.0,
    }
    return tiny(**{**base, **changes})


def shifted(first: int, passed: int, number: int = 0) -> Any:
    """The stream of a phase that from step `first` on gives the batch of so many steps later."""
    real = Samples.step

    def step(self: Samples, step: int, **rest: Any) -> Any:
        here = self.seed[1] == number and self.seed[2] == 0 and step >= first
        return real(self, step + passed * here, **rest)

    return mock.patch.object(Samples, "step", step)


def assert_same_end(run: Run, reference: Run) -> None:
    ours, theirs = parameters(run), parameters(reference)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert metrics(run) == metrics(reference)


@pytest.mark.parametrize(
    ("precision", "cause", "factor"),
    [*((precision, "spike", 1000.0) for precision in ("fp32", "bf16", "fp16")), ("fp32", "not_finite", math.nan)],
)
def test_a_rollback_is_the_run_without_the_data_it_passed_over(
    precision: str, cause: str, factor: float, tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stability, "INITIAL_SCALE", 2.0**10)
    policy = {"stability.on_spike": "rollback", "stability.on_nonfinite": "rollback", "precision": precision}
    reference, run = (long_run(tiny, out=str(tmp_path / name), **policy) for name in ("reference", "run"))
    with shifted(first=8, passed=3):  # back to step 8, and over the data of steps 8, 9 and 10
        finish(reference)
    with planted(spike(run, 10, factor=factor)):
        finish(run)
    assert_same_end(run, reference)
    (event,) = (line for line in lines(run, "event") if line["event"] == "rolled_back")
    assert (event["from_step"], event["to_step"], event["batches_skipped"], event["cause"]) == (11, 8, 3, cause)
    assert event["message"].startswith("phase short: rolled back from step 11 to step 8 of the run, skipping 3 steps of data: step 11: ")
    # In fp16 the gradient of so large a loss overflows.
    said = "is not finite" if precision == "fp16" else "most of the gradient is in"
    assert (said in event["message"]) == (cause == "spike")
    assert event["samples"] == samples_of(run).provenance(10, 1, 0)


def test_without_a_checkpoint_and_at_a_second_phase_it_goes_back_to_the_beginning(tiny: Make, tmp_path: Path) -> None:
    for number, step, passed in ((0, 6, 7), (1, 1, 2)):
        changes = {"stability.on_nonfinite": "rollback", "checkpoint.save_every": 100}
        reference, run = (long_run(tiny, out=str(tmp_path / f"{name}-{number}"), **changes) for name in ("reference", "run"))
        with shifted(first=0, passed=passed, number=number):
            finish(reference)
        with planted(spike(run, step, number=number, factor=math.inf)):
            finish(run)
        assert_same_end(run, reference)


def test_a_second_spike_goes_back_again_and_both_are_recorded(tiny: Make, tmp_path: Path) -> None:
    reference, run = (long_run(tiny, out=str(tmp_path / name), **{"stability.on_spike": "rollback"}) for name in ("reference", "run"))
    with shifted(first=8, passed=5):
        finish(reference)
    with planted(spike(run, 10, 12)):
        finish(run)
    assert_same_end(run, reference)
    events = [
        (line["from_step"], line["to_step"], line["batches_skipped"]) for line in lines(run, "event") if line["event"] == "rolled_back"
    ]
    assert events == [(11, 8, 3), (10, 8, 5)]  # the second time, step 10 read the data of step 12


def test_a_loss_scale_at_its_floor_goes_back_too_and_a_spike_leaves_the_scale_alone() -> None:
    def settings(policy: Any) -> loop.LoopConfig:
        return loop.LoopConfig(1, lambda t: 1.0, 1.0, torch.float16, torch.device("cpu"), (0,), on_nonfinite=policy, on_spike="skip")

    with pytest.raises(Rollback, match=r"step 3: bad\. the loss scale is at its floor"):
        loop.handle_bad_step(2, NonFiniteError, "bad", 0, 1, settings("rollback"), LossScale(1.0))
    for policy in ("stop", "skip"):
        with pytest.raises(NonFiniteError, match="at its floor"):
            loop.handle_bad_step(2, NonFiniteError, "bad", 0, 1, settings(policy), LossScale(1.0))
    scale = LossScale(8.0)
    loop.handle_bad_step(2, Spike, "high", 0, 1, settings("stop"), scale)
    assert (scale.scale, scale.clean) == (8.0, 1)
    loop.handle_bad_step(2, NonFiniteError, "bad", 0, 1, settings("rollback"), scale)
    assert (scale.scale, scale.clean) == (4.0, 0)


def test_twenty_rollbacks_to_one_checkpoint_end_the_run(tiny: Make) -> None:
    run = long_run(tiny, **{"stability.on_nonfinite": "rollback"})
    with planted(spike(run, *range(5, 60), factor=math.nan)), pytest.raises(NonFiniteError) as caught:
        finish(run)
    assert "phase short, step 5: the mlm loss is nan" in str(caught.value) and "went back to step 4 20 times" in str(caught.value)
    assert [line["event"] for line in lines(run, "event")].count("rolled_back") == 20
    assert "The last good checkpoint is " in str(caught.value)


def _killed_in_step_13(run: Run, plant: dict[str, Any]) -> None:
    real, count = loop.clip_and_step, 0

    def step(*args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    loop.clip_and_step = step
    with planted(plant):
        pretrain(run)


def test_a_crash_or_a_kill_after_a_rollback_changes_nothing(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = (long_run(tiny, out=str(tmp_path / name), **{"stability.on_spike": "rollback"}) for name in ("whole", "killed"))
    plant, real = spike(whole, 10), loop.clip_and_step
    with Process(_killed_in_step_13, killed, plant) as process:
        code, output = process.end()
    assert code == -signal.SIGKILL and "rolled back from step 11 to step 8" in output, output
    with planted(plant):
        finish(whole)
        finish(killed)
        assert_same_run(whole, killed)
        for at in (12, 15):  # at the first step after it, and after the next checkpoint
            cut, count = long_run(tiny, out=str(tmp_path / f"cut-{at}"), **{"stability.on_spike": "rollback"}), 0

            def crash(*args: Any, at: int = at) -> torch.Tensor:
                nonlocal count
                count += 1
                if count == at:
                    raise Stop
                return real(*args)

            with monkeypatch.context() as patch:
                patch.setattr(loop, "clip_and_step", crash)
                with pytest.raises(Stop):
                    finish(cut)
            finish(cut)
            assert_same_run(whole, cut)
            assert [line["event"] for line in lines(cut, "event")].count("rolled_back") == 1


def test_skip_takes_no_step_and_leaves_the_window_alone(tiny: Make) -> None:
    run, told = long_run(tiny, **{"stability.on_spike": "skip"}), io.StringIO()
    with planted(spike(run, 6, 9)):
        pretrain(run, Line(told))
    skipped = [line for line in lines(run, "event") if line["event"] == "skipped"]
    assert [line["global_step"] for line in skipped] == [7, 10]
    assert "step 7 skipped: the loss is " in told.getvalue() and "deviations above its usual" in skipped[0]["message"]
    assert skipped[0]["samples"] == samples_of(run).provenance(6, 1, 0)
    at = {p: reader.read_checkpoint(run.run_dir / "checkpoints" / f"step-{p:07d}")[0] for p in (8, 12)}
    assert [len(at[p].states["spikes"]["loss"]) for p in at] == [7, 10] and [at[p].skipped for p in at] == [1, 2]


def test_stop_names_the_batch_and_the_same_command_meets_it_again(tiny: Make) -> None:
    run = long_run(tiny, **{"stability.on_spike": "stop"})
    with planted(spike(run, 10)):
        for _ in range(2):
            with pytest.raises(
                Spike, match=r"phase short, step 11: the loss is .* The micro-batch with the largest loss holds the samples "
            ):
                finish(run)
            assert lines(run, "event")[-1]["event"] == "spike"
    finish(dataclasses.replace(run, stability=dataclasses.replace(run.stability, on_spike="skip")))


def test_ignore_says_it_once_and_goes_on(tiny: Make) -> None:
    run, told = long_run(tiny), io.StringIO()
    with planted(spike(run, 6, 7)):
        pretrain(run, Line(told))
    assert [line["global_step"] for line in lines(run, "event") if line["event"] == "spike"] == [7]
    assert told.getvalue().count("deviations above its usual") == 1
