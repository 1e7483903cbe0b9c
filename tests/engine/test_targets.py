"""Losses are means over targets, however they are spread over steps, and what is watched is what is minimized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overnight.batches.packing import IGNORED, StepBatches
from overnight.config import AdamWConfig, Run
from overnight.distributed.world import World
from overnight.engine.loop import LoopConfig, StepResult, evaluate, training_steps
from overnight.engine.spikes import LEAST, Spike, SpikeDetector, measured
from overnight.engine.throughput import Throughput
from overnight.optim.groups import build_optimizer
from tests.engine.test_byte_training import finish, folder, lines, make  # noqa: F401

Make = Callable[..., Run]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Few:
    """A batch of plain numbers: the summed loss of each name is that of its targets."""

    targets: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Few:
        return self


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def losses(self, batch: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        used = {name: x[x != IGNORED] for name, x in batch.targets.items()}
        hits = {} if self.training else {name: (x > 0).sum() for name, x in used.items()}
        return {name: (self.weight * x).sum() for name, x in used.items()}, hits


def step_of(**targets: list[float]) -> StepBatches:
    return StepBatches((Few({name: torch.tensor(x) for name, x in targets.items()}),), 10, 1)


def settings(**changes: Any) -> LoopConfig:
    values = {"steps": 60, "lr": lambda step: 0.0, "max_grad_norm": 0.0, "dtype": torch.float32, "device": CPU, "seed": (0,)}
    return LoopConfig(**{**values, **changes})


def steps(
    work: Callable[[int], StepBatches], weight: float, spike_detector: SpikeDetector | None = None, **changes: Any
) -> list[StepResult]:
    model = Toy()
    optimizer = build_optimizer(model, AdamWConfig())
    return list(
        training_steps(
            model, model.losses, optimizer, work, settings(weights=lambda step: {"label": weight}, **changes), spike_detector=spike_detector
        )
    )


def test_a_loss_of_no_weight_makes_no_spike_and_one_of_full_weight_does() -> None:
    def work(step: int) -> StepBatches:
        return step_of(byte=[5.0, 5.0 + step % 3 / 10], label=[1000.0 if step == 50 else 1.0])

    assert len(steps(work, 1e-6, SpikeDetector(10.0, {}))) == 60
    with pytest.raises(Spike, match=r"step 51: the loss is 1005"):
        steps(work, 1.0, SpikeDetector(10.0, {}))


def test_the_loss_that_is_watched_is_the_weighted_sum() -> None:
    model = Toy()
    model.weight.grad = torch.tensor([3.0])
    optimizer = build_optimizer(model, AdamWConfig())
    losses, weights = {"byte": torch.tensor(5.0), "label": torch.tensor(20.0)}, {"label": 0.25}
    assert measured(losses, {"byte": 8, "label": 2}, weights, optimizer, World()) == {"loss": 10.0, "grad_norm": 3.0}
    # A step without a label is compared with those without one.
    assert measured(losses, {"byte": 8, "label": 0}, weights, optimizer, World()) == {"loss of byte alone": 5.0, "grad_norm": 3.0}


def test_a_rare_label_is_no_spike() -> None:
    def work(step: int) -> StepBatches:
        return step_of(byte=[5.0, 5.0 + step % 3 / 10], label=[20.0] if step % 20 == 19 else [])

    spike_detector = SpikeDetector(10.0, {})
    # The norm of the gradient of one number would tell the label.
    spike_detector.spike = lambda values, real=spike_detector.spike: real({k: v for k, v in values.items() if k != "grad_norm"})  # type: ignore[method-assign, misc]
    assert len(steps(work, 1.0, spike_detector)) == 60
    assert len(spike_detector.window["loss of byte alone"]) > LEAST and len(spike_detector.window["loss"]) == 3


def test_a_step_without_a_label_adds_nothing_to_the_mean_and_others_add_each_target_once() -> None:
    labels: list[list[float]] = [[], [30.0, 10.0, 20.0], [], [40.0], [IGNORED, IGNORED]]
    meter = Throughput({}, 0)
    meter._unread = steps(lambda t: step_of(byte=[1.0] * (t + 1), label=labels[t]), 0.5, steps=5)
    meter.read()
    assert meter.running == {"byte": [15.0, 15], "label": [100.0, 4]}
    # Reading in two goes, as around a checkpoint, is the same.
    whole, done = meter.take_losses(), steps(lambda t: step_of(byte=[1.0] * (t + 1), label=labels[t]), 0.5, steps=5)
    for part in (done[:2], done[2:]):
        meter._unread = part
        meter.read()
    assert meter.running == whole


def test_validation_losses_and_accuracies_are_means_over_targets_and_absent_without_any() -> None:
    work = [step_of(byte=[1.0, 3.0], label=[]), step_of(byte=[-4.0], label=[]), step_of(byte=[2.0, 2.0, 2.0], label=[IGNORED])]
    found = evaluate(Toy(), Toy().eval().losses, work, settings())
    assert found == {"byte_loss": 1.0, "byte_accuracy": pytest.approx(5 / 6)}


def test_logged_losses_do_not_depend_on_how_often_they_are_logged(make: Make) -> None:  # noqa: F811
    """Where some windows have a label and some have none."""
    changes: dict[str, Any] = {"phase": {"label_weight": 0.5, "seq_len": 8, "global_batch_size": 2, "micro_batch_size": 2, "steps": 24}}
    found = {}
    for every in (1, 24):
        run = make(f"every-{every}", **changes, settings={"logging.log_every": every, "logging.eval_every": 24})
        finish(run)
        found[every] = lines(run, "train")
    (whole,) = found[24]
    labeled = [line for line in found[1] if "label_loss" in line]
    assert 0 < len(labeled) < 24
    assert min(line["label_loss"] for line in labeled) <= whole["label_loss"] <= max(line["label_loss"] for line in labeled)
    assert whole["loss"] == pytest.approx(whole["byte_loss"] + 0.5 * whole["label_loss"])
