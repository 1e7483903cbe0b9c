"""The loop measures tensors and noise beside the training, which stays as it was bit by bit; the run writes what it measured."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overnight.batches.packing import StepBatches
from overnight.checkpoint import reader
from overnight.config import OPTIMIZERS, LambConfig, MuonConfig, Optim, Run
from overnight.console import Line
from overnight.engine import loop, pretrain, trainer
from overnight.engine.loop import LoopConfig, StepResult, training_steps
from overnight.errors import ConfigError
from overnight.optim.groups import build_optimizer
from tests.conftest import CLOCK
from tests.engine.test_pretrain import finish
from tests.models.sample import pretraining, random_batch
from tests.optim.test_telemetry import Readings

Make = Callable[..., Run]


def work(step: int) -> StepBatches:
    """Four micro-batches of three sequences each."""
    micro = tuple(random_batch([20, 13 + i, 9], seed=10 * step + i) for i in range(4))
    return StepBatches(micro, sum(sum(batch.lengths) for batch in micro), 12)


def settings(steps: int = 4, **changes: Any) -> LoopConfig:
    values = {"steps": steps, "lr": lambda step: 0.01, "max_grad_norm": 1.0, "dtype": torch.float32, "seed": (1, 2)}
    return LoopConfig(**{**values, "device": torch.device("cpu"), **changes})


def train(name: str = "lamb", optim: Optim | None = None, **changes: Any) -> tuple[nn.Module, Iterator[StepResult]]:
    """A small BERT with dropout, and the steps of its training."""
    model = pretraining(dropout=0.1, attention_dropout=0.1)
    optimizer = build_optimizer(model, optim or OPTIMIZERS[name](lr=0.01))  # type: ignore[arg-type]
    return model, training_steps(model, model.losses, optimizer, work, settings(**changes))


def run(name: str, **changes: Any) -> tuple[nn.Module, list[StepResult]]:
    model, steps = train(name, **changes)
    return model, list(steps)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_measuring_changes_no_bit_of_the_training(name: str) -> None:
    (plain, before), (measured, after) = run(name), run(name, measure_every=1, noise_every=1)
    for (label, a), b in zip(plain.named_parameters(), measured.parameters(), strict=True):
        assert torch.equal(a, b), label
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a.grad_norm, b.grad_norm) and all(torch.equal(a.losses[k], b.losses[k]) for k in ("mlm", "nsp"))


def test_only_the_steps_asked_for_are_measured() -> None:
    _, steps = run("lamb", steps=6, measure_every=2, noise_every=3)
    assert [step.step for step in steps if step.tensors] == [2, 4, 6]
    assert [step.step for step in steps if step.noise] == [3, 6]
    _, steps = run("lamb", steps=2)
    assert not any(step.tensors or step.noise for step in steps)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_measuring_reads_nothing_from_the_device(name: str) -> None:
    counts = []
    for every in (0, 1):
        _, steps = train(name, measure_every=every, noise_every=every)
        next(steps)  # makes the optimizer's state
        with Readings() as readings:
            next(steps)
        counts.append(readings.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_gradient_norm_is_the_one_before_clipping(name: str) -> None:
    _, (step,) = run(name, steps=1, measure_every=1, noise_every=1, max_grad_norm=1e-3)
    assert step.tensors and step.noise
    norm = math.sqrt(sum(row[1] ** 2 for row in step.tensors.rows(17).values() if row[1]))
    assert norm > 1e-3
    assert float(step.grad_norm) == pytest.approx(norm, rel=1e-5)
    assert step.noise.squares()["run"][1] == pytest.approx(norm**2, rel=1e-5)


def test_a_layer_wise_optimizer_clips_once_and_the_others_are_clipped_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []
    real = loop.clip

    def clip(parameters: list[Tensor], bound: float, names: list[str] | None) -> Tensor:
        bounds.append(bound)
        return real(parameters, bound, names)

    monkeypatch.setattr(loop, "clip", clip)
    for name in OPTIMIZERS:
        bounds.clear()
        run(name, steps=1, max_grad_norm=0.5)
        assert bounds == ([0.5] if name in ("adamw", "muon") else []), name


def test_a_pair_is_made_of_the_gradients_of_the_micro_batches() -> None:
    _, (step,) = run("lamb", steps=1, noise_every=1)
    assert step.noise and (step.noise.b, step.noise.B) == (3, 12)
    small, big = step.noise.squares()["run"]

    # The same gradients, each by a step of its own, by the same dropout and divided as in the whole step.
    model = pretraining(dropout=0.1, attention_dropout=0.1)
    batches, divisors = work(0).micro, work(0).divisors()
    torch.manual_seed(loop.key(1, 2, 0) >> 1)
    alone = []
    for batch in batches:
        summed, _ = model.losses(batch, torch.float32)
        loss = summed["mlm"] / divisors["mlm"] + summed["nsp"] / divisors["nsp"]
        grads = torch.autograd.grad(loss, list(model.parameters()))
        alone.append(torch.cat([g.double().flatten() for g in grads]))
    assert small == pytest.approx(float(torch.stack(alone).mul(4).square().sum(1).mean()), rel=1e-5)
    assert big == pytest.approx(float(torch.stack(alone).sum(0).square().sum()), rel=1e-5)
    assert small > big


def test_a_step_of_one_micro_batch_is_passed_over() -> None:
    model = pretraining()
    optimizer = build_optimizer(model, LambConfig(lr=0.01))

    def whole(step: int) -> StepBatches:
        return StepBatches((random_batch([9, 7]),), 16, 2)

    assert [step.noise for step in training_steps(model, model.losses, optimizer, whole, settings(2, noise_every=1))] == [None, None]


MEASURED = {
    "logging.tensor_norms_every": 2,
    "logging.grad_noise_every": 1,
    "phases.short.micro_batch_size": 2,
    "phases.long.micro_batch_size": 2,
}


def lines(run: Run, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in found if line["kind"] in kinds]


def test_a_run_writes_its_tensors_and_its_noise_scale(tiny: Make) -> None:
    run = tiny(**MEASURED)
    text = finish(run)
    tensors, noise = lines(run, "tensor_norms"), lines(run, "noise")
    assert [line["global_step"] for line in tensors] == [2, 4, 6, 8, 10]
    assert [line["global_step"] for line in noise] == list(range(1, 11))
    model = pretrain.TrainingRun(run, Line(io.StringIO())).model
    for line in tensors:
        assert list(line["tensor_norms"]) == [name for name, _ in model.named_parameters()]
        assert all(len(row) == 4 for row in line["tensor_norms"].values())
    row = tensors[0]["tensor_norms"]["encoder.word.weight"]
    assert all(x > 0 and x == float(f"{x:.5g}") for x in row)
    assert tensors[0]["tensor_norms"]["encoder.norm.bias"][3] is None
    groups = [group["name"] for group in build_optimizer(model, run.phases["short"].optim).param_groups]
    assert {tuple(line["groups"]) for line in noise} == {("run", *groups)}
    assert {(line["phase"], line["step"], line["batch"]) for line in noise[5:7]} == {("short", 6, 8), ("long", 1, 8)}
    assert text.count("noise scale ") == len(lines(run, "eval"))


def test_what_is_measured_is_the_same_after_a_resume(
    tiny: Make, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny(**MEASURED, out=str(tmp_path_factory.mktemp("whole") / "run"))
    finish(whole)
    run, real, count = tiny(**MEASURED), loop.clip_and_step, 0

    def crash(*args: Any) -> Tensor:
        nonlocal count
        count += 1
        if count in (4, 9):
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(loop, "clip_and_step", crash)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            finish(run)
    finish(run)
    assert lines(run, "tensor_norms", "noise", "train") != []
    kinds = ("train", "tensor_norms", "noise", "eval")
    mine, theirs = ([{k: v for k, v in line.items() if k not in CLOCK} for line in lines(r, *kinds)] for r in (run, whole))
    assert mine == theirs


def test_noise_needs_two_micro_batches_and_says_so_before_anything_is_written(tiny: Make) -> None:
    run = tiny(**{"logging.grad_noise_every": 5, "phases.long.micro_batch_size": 32})
    with pytest.raises(
        ConfigError,
        match=r"logging\.grad_noise_every = 5: .* phase long takes its batch of 8 .*; set phases\.long\.micro_batch_size below 8",
    ):
        finish(run)
    assert not run.run_dir.exists()


def test_losses_are_read_when_a_line_is_due_and_no_loss_is_lost(
    tiny: Make, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[float] = []

    def recorded(*args: Any, **settings: Any) -> Iterator[StepResult]:
        for done in training_steps(*args, **settings):
            targets.append(done.targets["mlm"])
            yield done

    monkeypatch.setattr(trainer, "training_steps", recorded)
    every, third = tiny(), tiny(**{"logging.log_every": 3, "checkpoint.save_every": 2}, out=str(tmp_path_factory.mktemp("third") / "run"))
    finish(every)
    finish(third)
    singly = {line["global_step"]: line["mlm_loss"] for line in lines(every, "train")}
    for line, steps in zip(lines(third, "train"), ((1, 2, 3), (4, 5, 6), (7, 8, 9), (10,)), strict=True):
        assert line["global_step"] == steps[-1]
        total = sum(targets[step - 1] for step in steps)
        assert line["mlm_loss"] == pytest.approx(sum(singly[step] * targets[step - 1] for step in steps) / total, rel=1e-12)
    newest = reader.newest_checkpoint(third.run_dir / "checkpoints")
    assert newest is not None and reader.read_checkpoint(newest)[0].states["metrics"]["running"] == {}


def test_each_group_takes_its_share_of_the_learning_rate() -> None:
    model = pretraining()
    optimizer = build_optimizer(model, MuonConfig(base_width=4 * model.encoder.word.weight.shape[1]))
    rates = {}
    for _ in training_steps(model, model.losses, optimizer, work, settings(steps=1, lr=lambda step: 0.01)):
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"matrices": 0.02, "embeddings": 0.04, "vectors": 0.01}


def test_gradients_below_the_bound_are_not_passed_over_and_are_as_torch_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled: list[float] = []
    real = torch.nn.utils.clip_grads_with_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *given: (scaled.append(given[1]), real(*given)))
    for bound, passes in ((0.1, 1), (1e-7, 2), (1e3, 2), (0.0, 2)):
        ours, theirs = torch.ones(50), torch.ones(50)
        ours.grad, theirs.grad = torch.full((50,), 0.3), torch.full((50,), 0.3)
        norm = loop.clip([ours], bound)
        assert len(scaled) == passes
        if bound:
            real([theirs], bound, norm)
        assert torch.equal(ours.grad, theirs.grad)
