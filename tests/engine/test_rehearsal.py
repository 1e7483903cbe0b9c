"""Steps that are timed beforehand are those that training would take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overnight.batches.packing import Batch
from overnight.config import Run
from overnight.distributed.world import World
from overnight.engine import rehearsal
from overnight.engine.memory import OutOfMemory
from overnight.engine.workload import Workload, build_workload

CPU = torch.device("cpu")


def rehearsed(run: Run, fits: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Workload, list[int]]:
    """What is timed where micro-batches of so many sequences fit, and a list of those that are tried."""
    workload, sizes = build_workload(run, World()), list[int]()
    losses: Callable[..., Any] = workload.model.losses

    def limited(batch: Batch, dtype: torch.dtype) -> Any:
        sizes.append(len(batch.targets["nsp"]))  # the sequences behind them fill the stream up
        if sizes[-1] > fits:
            raise RuntimeError("CUDA error: out of memory")
        return losses(batch, dtype)

    monkeypatch.setattr(workload.model, "losses", limited)
    monkeypatch.setattr(rehearsal, "_SECONDS", 0.0)
    return workload, sizes


@pytest.mark.parametrize(("asked", "tried"), [(8, [8, 4, 2]), (0, [8, 4, 2]), (2, [2])])
def test_steps_that_do_not_fit_are_timed_in_smaller_micro_batches(
    asked: int, tried: list[int], tiny: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(**{"phases.short.micro_batch_size": asked})
    workload, sizes = rehearsed(run, 3, monkeypatch)
    assert rehearsal.seconds_per_step(run, workload, 0, CPU) > 0
    assert list(dict.fromkeys(sizes)) == tried and sizes.count(2) == 4 * 5


def test_a_network_of_which_not_one_sequence_fits_is_not_timed(tiny: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    workload, sizes = rehearsed(run, 0, monkeypatch)
    with pytest.raises(OutOfMemory, match="step 1 ran out of memory"):
        rehearsal.seconds_per_step(run, workload, 0, CPU)
    assert sizes == [4, 2, 1]


@pytest.mark.parametrize(
    ("device", "memory", "asked", "width", "precision", "timed"),
    [
        ("cpu", 16e9, 0, 32, "bf16", 32),
        ("cuda", 16e9, 0, 32, "bf16", 1024),
        ("cuda", 16e9, 0, 8192, "bf16", 512),
        ("cuda", 16e9, 0, 8192, "fp32", 256),
        ("cuda", 16e9, 0, 1 << 16, "bf16", 256),
        ("cuda", 160e9, 0, 1 << 16, "bf16", 512),
        ("cuda", 16e9, 64, 32, "bf16", 64),
    ],
)
def test_an_open_micro_batch_is_timed_with_as_many_sequences_as_take_about_half_of_the_memory_of_a_gpu(
    device: str,
    memory: float,
    asked: int,
    width: int,
    precision: str,
    timed: int,
    tiny: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(rehearsal, "memory_budget", lambda device: SimpleNamespace(limit=memory))
    monkeypatch.setattr(rehearsal, "_timed", lambda run, workload, phase, number, size, device: sizes.append(size) or 1.0)
    run = tiny(
        **{
            "phases.short.global_batch_size": 1024,
            "phases.short.micro_batch_size": asked,
            "model.hidden_size": width,
            "precision": precision,
        }
    )
    assert rehearsal.seconds_per_step(run, None, 0, torch.device(device)) == 1.0  # type: ignore[arg-type]
    assert sizes == [timed]


def test_a_gpu_is_waited_for_after_stretches_and_each_tells_the_time_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host asks for a step in 0.2 s, the device does it in 0.3 s and compiles for 5 s at the first."""
    host, device = 0.0, 0.0

    def steps() -> Iterator[int]:
        nonlocal host, device
        for step in range(12):
            host += 0.2
            device = max(device, host) + (5.0 if step == 0 else 0.3)
            yield step

    def wait() -> None:
        nonlocal host
        host = max(host, device)

    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: host)
    first, *others = rehearsal.stretches(steps(), wait, 0.5)
    assert first == pytest.approx(5.2) and len(others) == 3
    # The first of a stretch waits for its host: a third of 0.2 s more.
    assert others == pytest.approx([0.2 / 3 + 0.3] * 3)
    assert len(list(rehearsal.stretches(steps(), wait, 0.0))) == 12


def test_state_of_the_optimizer_that_does_not_fit_is_told_as_such(tiny: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny()
    workload, _ = rehearsed(run, 8, monkeypatch)

    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(rehearsal, "build_optimizer", full)
    with pytest.raises(OutOfMemory, match=r"^CUDA out of memory\. Tried to allocate 2 GiB\.$"):
        rehearsal.seconds_per_step(run, workload, 0, CPU)
