"""`overnight bench scaling`: a step of data-parallel training on 1, 2 and 4 processes, and how much of the communication hides behind it.

Each process has its own batch (weak scaling) and, on a CPU, one thread on a core of its own, as far as there are cores and the system can keep it there. Three times are taken in turns:
the work without communication, the all-reduce of as many bytes alone, and the step with both. Processes of one machine share its memory and,
where they are more than its cores, its cores: this says what overlaps and what the engine loses, not what a cluster would give.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from overnight import config
from overnight.bench.measure import Row, printed
from overnight.bench.sizes import MODELS, VOCABULARY, full_batch, training_dtype
from overnight.config import Run
from overnight.distributed.world import World
from overnight.distributed.wrap import gradient_sync, parallelize_model
from overnight.errors import UserError
from overnight.machine import usable_cores
from overnight.models.bert import BertForPretraining

_SEQUENCES, _LENGTH, _REPEATS = 8, 128, 9
_TIMES = "times.json"


@dataclass(frozen=True)
class Times:
    """Of a step (s), medians of the slowest process."""

    work: float
    """Forward and backward pass without communication."""
    reduce: float
    """The all-reduce of the gradients alone."""
    both: float
    """Forward and backward pass with the all-reduce at the same time."""

    @property
    def hidden(self) -> float:
        """Share of the communication that is not seen in the step (0 to 1)."""
        return min(1.0, max(0.0, 1 - (self.both - self.work) / self.reduce)) if self.reduce else 1.0


def run(tiny: bool = False) -> None:
    """Measure every number of processes and print the rows, JSON last."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    worlds = [n for n in (1, 2, 4, 8) if n <= gpus] if gpus else [1, 2, 4]
    cores = usable_cores()
    with printed("scaling") as rows:
        for world in worlds:
            times = measured(world, "bert-tiny" if tiny else "bert-mini", 2 if tiny else _REPEATS)
            rows += [
                Row(f"{world} processes", world * _SEQUENCES / times.both, "sequences/s", peer="1 process", peer_value=_alone(rows, times)),
                Row(f"{world} processes, efficiency", 100 * _SEQUENCES / times.both / _alone(rows, times), "%"),
            ]
            note = "" if gpus or world <= cores else f"  ({world} processes on {cores} cores)"
            times_text = f"work {1e3 * times.work:.1f} ms, all-reduce {1e3 * times.reduce:.1f} ms, step {1e3 * times.both:.1f} ms"
            print(
                f"{world} processes  {rows[-2].value:8.2f} sequences/s  efficiency {_efficiency(rows, world):.0f} %  {times_text}", end=""
            )
            if world > 1:
                rows.append(Row(f"{world} processes, communication hidden", 100 * times.hidden, "%"))
                print(f", {rows[-1].value:.0f} % of it hidden", end="")
            print(note, flush=True)


def measured(world: int, model: str, repeats: int) -> Times:
    """Return the times on so many processes, which are started for it and are gone when it ends.

    Raises:
        UserError: when one of them fails, for which the others would wait.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "overnight.bench.scaling", folder, model, str(repeats), str(world)]
        # What they print, such as NCCL with NCCL_DEBUG, is no result.
        ranks = [subprocess.Popen([*command, str(rank)], stdout=2) for rank in range(world)]
        codes: list[int | None] = [None]
        try:
            while None in codes and not any(codes):
                time.sleep(0.05)
                codes = [rank.poll() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for number, code in enumerate(codes):
            if code:
                raise UserError(f"process {number} of {world} ended with {code}; its output is above")
        return Times(**json.loads((Path(folder) / _TIMES).read_text(encoding="utf-8")))


def work(model: str, repeats: int, world: World) -> Times:
    """Return what one process does, as one of a group that is there."""
    run = _recipe()
    torch.manual_seed(0)
    net = BertForPretraining(MODELS[model], VOCABULARY).to(world.device).train()
    batch = full_batch(_SEQUENCES, _LENGTH, round(0.15 * _LENGTH), seed=world.rank).to(world.device)
    objective = parallelize_model(net, world, run)
    gradients = torch.zeros(sum(p.numel() for p in net.parameters()), device=world.device)
    dtype = training_dtype(world.device)

    def step(last: bool) -> None:
        with gradient_sync(objective, last=last):
            losses, _ = objective(batch, dtype)
            (losses["mlm"] + losses["nsp"]).backward()
        for p in net.parameters():  # kept: DDP's buckets are views of them
            if p.grad is not None:
                p.grad.zero_()

    def reduce() -> None:
        if world.size > 1:
            dist.all_reduce(gradients)

    functions: dict[str, Callable[[], None]] = {"work": lambda: step(False), "reduce": reduce, "both": lambda: step(True)}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(2 + repeats):
        for name, function in functions.items():
            if world.size > 1:
                dist.barrier()
            start = time.perf_counter()
            function()
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    found = torch.tensor([median(values) for values in seconds.values()], device=world.device)
    if world.size > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return Times(*found.tolist())


def _alone(rows: list[Row], times: Times) -> float:
    return rows[0].value if rows else _SEQUENCES / times.both


def _efficiency(rows: list[Row], world: int) -> float:
    return next(row.value for row in rows if row.name == f"{world} processes, efficiency")


def _recipe() -> Run:
    return config.build_run({"name": "scaling", "phases": {"short": {"steps": 1, "global_batch_size": _SEQUENCES}}})


def pin(rank: int) -> None:
    """Keep this process on a core of its own, as far as there are cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def main(folder: str, model: str, repeats: str, size: str, rank: str) -> None:
    """Pin this process, measure, and write the times into a folder that the processes share."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(rank))
        torch.cuda.set_device(device)
    else:
        pin(int(rank))
        torch.set_num_threads(1)
    world = World(int(rank), int(size), device)
    if world.size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", f"file://{folder}/store", rank=world.rank, world_size=world.size
        )
    times = work(model, int(repeats), world)
    if world.size > 1:
        # Only now: DDP must be gone before its group is, or the last thread of gloo waits for the interpreter and it for the thread.
        gc.collect()
        dist.destroy_process_group()
    if world.main:
        (Path(folder) / _TIMES).write_text(json.dumps(asdict(times)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
