"""Faults to plant in a run, in this process or in one of many: spikes in chosen data, a flipped bit, a slow process, a broken loader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from overnight.batches.loader import Samples
from overnight.batches.packing import Batch, StepBatches
from overnight.config import Run
from overnight.corpus.shards import open_shards
from overnight.corpus.tokenizer import load_vocabulary
from overnight.distributed import stragglers
from overnight.engine import loop, spikes
from overnight.errors import DataError
from overnight.models.bert import BertForPretraining

_MARK = 12


def samples_of(run: Run, number: int = 0) -> Samples:
    """The training stream of a phase."""
    phase = list(run.phases.values())[number]
    return Samples(open_shards(run.data_dir, "train"), load_vocabulary(run.data_dir), phase, (run.seed, number, 0))


def spike(run: Run, *steps: int, number: int = 0, world: int = 1, factor: float = 1000.0) -> dict[str, Any]:
    """A plant: the loss of the first micro-batch of these steps of the data (from 0) is so many times larger."""
    samples = samples_of(run, number)
    marks = [samples.step(step, world=world).micro[0].ids_N[:_MARK].tolist() for step in steps]
    return {"spike": marks, "factor": factor}


@contextmanager
def planted(plant: dict[str, Any], rank: int = 0) -> Iterator[None]:
    """Within it, the faults of a plant; spikes are judged after 4 values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spikes, "LEAST", 4)
        if "spike" in plant:
            patch.setattr(BertForPretraining, "losses", _spiked(plant["spike"], plant["factor"]))
        patch.setattr(stragglers, "_EXCESS", 30.0)  # no process of a busy machine is as late
        if plant.get("late", [None])[0] == rank:
            _be_late(patch, plant["late"][1])
        if plant.get("flip", [None])[0] == rank:
            patch.setattr(loop, "clip_and_step", _flipped(*plant["flip"][1:]))
        if plant.get("nan", [None])[0] == rank:
            patch.setattr(loop, "clip_and_step", _flipped(*plant["nan"][1:], nan=True))
        if plant.get("memory", [None])[0] == rank:
            patch.setattr(BertForPretraining, "losses", _out_of_memory(*plant["memory"][1:]))
        if plant.get("loader", [None])[0] == rank:
            patch.setattr(Samples, "step", _broken(plant["loader"][1]))
        yield


def _spiked(marks: list[list[int]], factor: float) -> Any:
    real = BertForPretraining.losses

    def losses(self: BertForPretraining, batch: Batch, dtype: torch.dtype) -> Any:
        found, hits = real(self, batch, dtype)
        if self.training and batch.ids_N[:_MARK].tolist() in marks:
            found = {**found, "mlm": found["mlm"] * factor}
        return found, hits

    return losses


def _be_late(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every micro-batch of training takes so many seconds more by this process's clock."""
    real, clock, late = BertForPretraining.losses, time.perf_counter, 0.0

    def losses(self: BertForPretraining, *args: Any) -> Any:
        nonlocal late
        late += seconds * self.training
        return real(self, *args)

    patch.setattr(BertForPretraining, "losses", losses)
    patch.setattr(time, "perf_counter", lambda: clock() + late)


def _out_of_memory(at: int, sequences: int) -> Any:
    """Micro-batch number `at` of training (from 1) finds no memory, if it has more than so many sequences."""
    real, count = BertForPretraining.losses, 0

    def losses(self: BertForPretraining, batch: Batch, dtype: torch.dtype) -> Any:
        nonlocal count
        count += self.training
        if self.training and count == at and len(batch.targets["nsp"]) > sequences:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines")
        return real(self, batch, dtype)

    return losses


def _flipped(at: int, name: str, nan: bool = False) -> Any:
    """After step `at`, the lowest bit of the first number of a parameter, or of an entry of the optimizer's state (name/entry), is another, or it is NaN."""
    real, count = loop.clip_and_step, 0

    def step(optimizer: torch.optim.Optimizer, *args: Any) -> torch.Tensor:
        nonlocal count
        norm, count = real(optimizer, *args), count + 1
        if count == at:
            parameter, _, entry = name.partition("/")
            (group,) = (group for group in optimizer.param_groups if parameter in group["param_names"])
            p = group["params"][group["param_names"].index(parameter)]
            with torch.no_grad():
                number = (optimizer.state[p][entry] if entry else p).view(-1)[:1]
                number.fill_(torch.nan) if nan else number.view(torch.int32).bitwise_xor_(1)
        return norm

    return step


def _broken(at: int) -> Any:
    real = Samples.step

    def step(self: Samples, step: int, **rest: Any) -> StepBatches:
        if step == at:
            raise DataError("shard train-00000.arrow cannot be read")
        return real(self, step, **rest)

    return step
