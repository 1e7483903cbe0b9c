"""How long the plans of an epoch take: which tokens are segment A and which B of every example, in C and in Python.

    python -m benchmarks.pair_plans

A shard of 640,000 sentences of 25 tokens (geometric), 25 sentences a document, of which the English Wikipedia makes about 280 (4.5 billion tokens, 180 million sentences).
Least CPU seconds of some repetitions, on one core. Shards are planned by as many threads as there are cores, outside of Python's lock. Into
benchmarks/results/<date>-<machine>-pair-plans/result.json go the rows.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path

import numpy as np
import psutil

from overnight.batches.pairs import plain_pairs, plain_segments, plan_pairs, plan_segments
from overnight.corpus.shards import Shard
from overnight.run_dir.environment import environment

SENTENCES, WIKIPEDIA = 640_000, 180_000_000


def shard() -> Shard:
    """The boundaries of a shard; its tokens are not looked at."""
    rng = np.random.default_rng(0)
    ends = np.append(np.flatnonzero(rng.random(SENTENCES - 1) < 1 / 25) + 1, SENTENCES)
    starts = np.concatenate([[0], np.cumsum(rng.geometric(1 / 25, SENTENCES))])
    return Shard("train-00000.arrow", np.zeros(1, np.uint16), starts, np.concatenate([[0], ends]))


def main() -> None:
    """Measure, print the table, keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=f"cpu{psutil.cpu_count()}", help="word for the machine in the name of the results folder")
    options = parser.parse_args()
    corpus, rows = shard(), []
    print(f"{'':16}{'tokens':>8}{'examples':>10}{'s / M sentences':>17}{'Wikipedia, 1 core':>19}{'8 cores, in C':>15}")
    for length in (128, 512):
        for make, repetitions in ((plan_pairs, 5), (plan_segments, 5), (plain_pairs, 2), (plain_segments, 2)):
            seconds, plan = [], make(corpus, length, 0.1, 0)  # the first one compiles
            for seed in range(repetitions):
                begin = time.process_time()
                make(corpus, length, 0.1, seed)
                seconds.append(time.process_time() - begin)
            least = min(seconds) / SENTENCES
            rows.append({"function": make.__name__, "tokens": length, "examples": len(plan), "seconds_per_million_sentences": least * 1e6})
            whole = least * WIKIPEDIA
            eight = f"{whole / 8:13.1f} s" if make in (plan_pairs, plan_segments) else ""  # Python's lock leaves the others one core
            print(f"{make.__name__:16}{length:8}{len(plan):10,}{least * 1e6:17.4f}{whole:17.1f} s{eight}", flush=True)
    out = Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-pair-plans"
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
