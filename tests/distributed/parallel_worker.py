"""What one process of tests/distributed/test_parallel.py does.

A job is a recipe to pretrain (one for all processes, or a list), perhaps the process that gets a SIGTERM and in which step, perhaps a
plant (:mod:`tests.engine.planted_faults`), perhaps where the loss scale starts, and perhaps what a step takes by the clock of each process (s).
"""

from __future__ import annotations

import io
import json
import os
import signal
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overnight import config
from overnight.console import Line
from overnight.engine import loop, run_clock, stability
from overnight.engine.pretrain import pretrain
from overnight.errors import UserError
from tests.engine.fake_clock import FakeClock
from tests.engine.planted_faults import planted
from tests.processes import HANG


def signal_after(steps: int) -> None:
    """Send this process a SIGTERM in its optimizer step number `steps`."""
    real, count = loop.clip_and_step, 0

    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    loop.clip_and_step = step


def move_clock(seconds: float) -> None:
    """Have nothing but the steps move the clock of this process."""
    clock, real = FakeClock(seconds), loop.clip_and_step

    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        clock.now += clock.step_seconds
        return real(*args, **kwargs)

    run_clock.CLOCK, loop.clip_and_step = clock, step


def work(rank: int, world: int, jobs: Path, on_warning: Any) -> None:
    """Do all jobs; print the exit code and the message of each."""
    warnings.simplefilter(on_warning, UserWarning)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "", "MASTER_PORT": ""}
    dist.init_process_group("gloo", init_method=f"file://{jobs}.rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=HANG))
    step, start, clock, said = loop.clip_and_step, stability.INITIAL_SCALE, run_clock.CLOCK, []
    for job in json.loads(jobs.read_text()):
        recipe = job["recipe"] if isinstance(job["recipe"], str) else job["recipe"][rank]
        stability.INITIAL_SCALE = job.get("start", start)
        if job.get("signal", [None])[0] == rank:
            signal_after(job["signal"][1])
        if "clock" in job:
            move_clock(job["clock"][rank])
        try:
            with planted(job["plant"], rank) if "plant" in job else nullcontext():
                pretrain(config.load_run(recipe), Line(io.StringIO()))
            said.append([0, ""])
        except UserError as error:
            said.append([error.exit_code, str(error)])
        loop.clip_and_step, run_clock.CLOCK = step, clock
    dist.destroy_process_group()
    print(json.dumps(said))
