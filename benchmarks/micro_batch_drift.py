"""Which micro-batch `micro_batch_size: 0` finds on a core that another program takes now and then.

    python -m benchmarks.micro_batch_drift             about ten minutes on one core

First the throughput of each micro-batch is measured on the quiet core, all taking turns. Then another process takes most of the core for
about two seconds, leaves it for about three, and so on, while trials find a micro-batch again and again: in turns by themselves, and with
the comparison that follows them. Each choice is counted, with the throughput that it has on the quiet core.
Into benchmarks/results/<date>-<machine>-micro-batch-drift/ goes result.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from overnight.batches.packing import Batch
from overnight.bench.sizes import full_batch
from overnight.config import BertPhase, ModernBertConfig
from overnight.distributed.world import World
from overnight.engine import micro_batch_trials
from overnight.models.modernbert import ModernBertForMaskedLM
from overnight.run_dir.environment import environment

VOCABULARY = 4096
SIZES = (1, 2, 4, 8, 16)


class _Sequences:
    """Random sequences of one length, in place of those of a phase."""

    phase = BertPhase(steps=1, global_batch_size=SIZES[-1], seq_len=256)

    def longest(self, count: int) -> Batch:
        return full_batch(count, 256, 77, VOCABULARY)

    average = longest


def take_the_core(seed: int) -> None:
    """Work for nine tenths of about two seconds and rest for about three, for ever."""
    randomness = random.Random(seed)
    while True:
        end = time.monotonic() + randomness.uniform(1, 3)
        while time.monotonic() < end:
            begun = time.monotonic()
            while time.monotonic() - begun < 0.009:
                pass
            time.sleep(0.001)
        time.sleep(randomness.uniform(1.5, 4.5))


def finder_of(layers: int, width: int) -> Any:
    """Return what tries micro-batches of a network in fp32."""
    model = ModernBertForMaskedLM(ModernBertConfig(num_layers=layers, hidden_size=width, num_heads=width // 64), VOCABULARY)
    run: Any = SimpleNamespace(logging=SimpleNamespace(grad_noise_every=0), compute=SimpleNamespace(torch_compile=False))
    samples: Any = _Sequences()
    return micro_batch_trials.BatchSizeFinder(run, model, model.losses, samples, torch.float32, World())


def measure(finder: Any, searches: int, seed: int) -> dict[str, Any]:
    """Return sequences/s of each micro-batch on the quiet core, and how often each was found beside the other process, both ways."""
    finder.model.train()
    rates: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(5):
        for size in SIZES:
            rates[size].append(SIZES[-1] / finder.time_passes(size, SIZES[-1] // size))
    quiet = {size: statistics.median(found) for size, found in rates.items()}
    turns, rows = micro_batch_trials._TURNS, {}
    other = multiprocessing.get_context("spawn").Process(target=take_the_core, args=(seed,), daemon=True)
    other.start()
    chosen: dict[str, list[int]] = {"trials": [], "trials and comparison": []}
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(searches):
        for name in chosen:
            micro_batch_trials._TURNS = turns if name != "trials" else 0
            begun = time.monotonic()
            chosen[name].append(finder.micro_batch(0)[0])
            seconds[name].append(time.monotonic() - begun)
    other.terminate()
    for name, found in chosen.items():
        rows[name] = {
            "chosen": dict(sorted(Counter(found).items())),
            "quiet_sequences_per_s": statistics.mean(quiet[size] for size in found),
            "seconds": statistics.mean(seconds[name]),
        }
    return {"quiet_sequences_per_s": quiet, "searches": searches, "rows": rows}


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--searches", type=int, default=20, help="of each kind (default 20)")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0, help="of the other process")
    parser.add_argument("--machine", default="cpu1", help="word for the machine in the name of the results folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = measure(finder_of(options.layers, options.width), options.searches, options.seed)
    best = max(found["quiet_sequences_per_s"].values())
    print("quiet:", ", ".join(f"{size}: {rate:.1f}" for size, rate in found["quiet_sequences_per_s"].items()), "sequences/s")
    for name, row in found["rows"].items():
        counts = ", ".join(f"{count} times {size}" for size, count in row["chosen"].items())
        share = row["quiet_sequences_per_s"] / best
        print(f"{name}: {counts}; {share:.1%} of the best throughput on average, {row['seconds']:.1f} s for a search")
    out = Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-micro-batch-drift"
    out.mkdir(parents=True, exist_ok=True)
    result = {"command": ["python", "-m", "benchmarks.micro_batch_drift", *sys.argv[1:]], "environment": environment(), **found}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
