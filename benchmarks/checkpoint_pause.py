"""What checkpoints cost the training: the time it stands still, and the time it is slowed while one is written.

    python -m benchmarks.checkpoint_pause                 both networks, about 5 minutes on two cores
    python -m benchmarks.checkpoint_pause bert-mini

Real steps of the training loop. Now and then a checkpoint is taken, waited for and not in turns. Lost is the time stood still, and what the steps until the
checkpoint is whole (at least one) took beyond the median of the undisturbed ones. The share is of 100 undisturbed steps, the default of
checkpoint.save_every; bert-base takes small batches, so that its steps are short and the share is the larger.
Into benchmarks/results/<date>-<machine>-checkpoint-pause/ goes result.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from overnight.batches.batch_size import pad_to_multiple
from overnight.bench.loop import recipe
from overnight.checkpoint.reader import TrainingProgress
from overnight.checkpoint.writer import CheckpointWriter
from overnight.config import Run
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.engine.loop import LoopConfig, training_steps
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import TrainingRun
from overnight.optim.groups import build_optimizer
from overnight.optim.schedules import learning_rate
from overnight.run_dir.environment import environment

BATCHES = {"bert-mini": 32, "bert-base": 8}
"""Sequences of 128 tokens in a step."""
_EVERY = 100
"""Steps between checkpoints, to which the share refers."""
_QUIET = 4
"""Undisturbed steps between two checkpoints at least."""


@dataclass
class Save:
    """One checkpoint."""

    asynchronous: bool
    stood: float
    """Seconds that the training stood still."""
    steps: list[float] = field(default_factory=list)
    """Seconds of the steps until it was whole, at least one."""

    def lost(self, undisturbed: float) -> float:
        """Seconds that it cost, by the time of an undisturbed step."""
        return self.stood + sum(seconds - undisturbed for seconds in self.steps)


def measure(model: str, saves: int, folder: Path) -> dict[str, Any]:
    """Take so many checkpoints of each kind while a network is trained.

    Args:
        model: one of BATCHES.
        folder: on the disk that is measured.
    """
    run = _run(folder, model)
    prepare(run.data, run.data_dir, log=lambda text: None)
    work = TrainingRun(run, Line(StringIO()))
    ((_, phase),) = run.phases.items()
    optimizer = build_optimizer(work.model, phase.optim)
    step = partial(work.workload.samples(phase, 0, "train").step, pad_to_multiple=pad_to_multiple(phase, phase.micro_batch_size))
    settings = LoopConfig(phase.steps, lambda step: learning_rate(phase, step), 1.0, DTYPES[run.precision], work.device, (0,))
    savers = [CheckpointWriter(folder / kind, 2, asynchronous=kind == "asynchronous") for kind in ("asynchronous", "waited")]
    taken: list[Save] = []
    undisturbed: list[float] = []
    quiet, start = -3, time.perf_counter()  # the first steps warm up
    for done in training_steps(work.model, work.objective, optimizer, step, settings):
        float(done.grad_norm)  # Only then has a GPU done the step.
        now = time.perf_counter()
        busy = any(saver.busy for saver in savers)
        if taken and (quiet == 0 or busy):
            taken[-1].steps.append(now - start)
            quiet = 0 if busy else 1
        else:
            undisturbed += [now - start] if quiet >= 0 else []
            quiet += 1
        if quiet > _QUIET:
            if len(taken) == 2 * saves:
                break
            saver = savers[len(taken) % 2]
            stood = saver.save(work.model, optimizer, TrainingProgress(global_step=done.step))
            taken.append(Save(saver is savers[0], stood))
            quiet = 0
        start = time.perf_counter()
    else:
        raise AssertionError("more steps were needed")
    usual = statistics.median(undisturbed)
    place = next((folder / "waited").glob("step-*"))
    row: dict[str, Any] = {
        "model": model,
        "parameters": sum(p.numel() for p in work.model.parameters()),
        "checkpoint_bytes": sum(path.stat().st_size for path in place.iterdir()),
        "batch": BATCHES[model],
        "step_seconds": round(usual, 4),
        "undisturbed_steps": len(undisturbed),
    }
    for kind in (True, False):
        # The first of a kind makes the host's buffers, or warms the disk up.
        of_kind = [save for save in taken if save.asynchronous == kind][1:]
        lost = [save.lost(usual) for save in of_kind]
        row["asynchronous" if kind else "waited"] = {
            "stood_seconds": [round(save.stood, 4) for save in of_kind],
            "lost_seconds": [round(seconds, 4) for seconds in lost],
            "share": round(statistics.median(lost) / (_EVERY * usual + statistics.median(lost)), 5),
        }
    return row


def _run(folder: Path, model: str) -> Run:
    run = recipe(folder, model, steps=1000)
    phases = {
        name: dataclasses.replace(phase, global_batch_size=BATCHES[model], micro_batch_size=BATCHES[model])
        for name, phase in run.phases.items()
    }
    return dataclasses.replace(run, phases=phases)


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(BATCHES), metavar="MODEL", help=f"of {', '.join(BATCHES)}; default both")
    parser.add_argument("--saves", type=int, default=6, help="checkpoints of each kind, the first of which is not counted (default 6)")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to measure; default the system's temporary one")
    parser.add_argument("--machine", default=f"cpu{os.cpu_count()}" if not torch.cuda.is_available() else "gpu")
    options = parser.parse_args()
    if options.saves < 2:
        parser.error("--saves must be 2 or more: the first of each kind is not counted")
    rows = []
    print(f"{'':10}{'MB':>8}{'a step':>9}   {'':14}{'stood':>9}{'lost':>9}{'of ' + str(_EVERY) + ' steps':>14}")
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=options.disk) as folder:
            row = measure(model, options.saves, Path(folder))
        rows.append(row)
        for kind in ("waited", "asynchronous"):
            stood, lost = (statistics.median(row[kind][f"{what}_seconds"]) for what in ("stood", "lost"))
            print(
                f"{model:10}{row['checkpoint_bytes'] / 1e6:8,.0f}{row['step_seconds']:7.2f} s   {kind:14}{stood:7.2f} s{lost:7.2f} s"
                f"{100 * row[kind]['share']:12.2f} %",
                flush=True,
            )
    out = Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-checkpoint-pause"
    out.mkdir(parents=True, exist_ok=True)
    result = {"command": ["python", "-m", "benchmarks.checkpoint_pause", *sys.argv[1:]], "environment": environment(), "rows": rows}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
