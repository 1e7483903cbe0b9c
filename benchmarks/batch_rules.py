"""Which rule takes a learning rate from a small batch to a large one? The table of Puri et al. 2018 (arXiv 1812.01466), small.

    OVERNIGHT_DATA=... python -m benchmarks.batch_rules     # two processes of one thread; resumes where it stopped
    OVERNIGHT_DATA=... python -m benchmarks.batch_rules --tiny
    python -m benchmarks.batch_rules --draw --out DIR       # only the picture, from the trials that are there

A multiplicative LSTM of 256 units reads the same bytes of the reviews of the recipe `mlstm-small` at every batch and with every rule, in
windows of 64, in bf16, through the same trainer as any run; Adam, no clipping, the learning rate linear to 0, as published. A rule says the
learning rate at a batch, from 5e-4 at 4 sequences: in proportion, by the square root, the same, or 3e-3 whatever the batch. (Published:
5e-4 at 128, and batches 16 to 256 times that; here 16, 64 and 256 times.) Reported are bits per byte of validation text, from the state carried
through it. A training has diverged when its loss is no number, or when in the end it predicts worse than one that knows nothing: 8 bits.

Into --out go trials.jsonl (a line a training), summary.json and rules.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch

from benchmarks.plots import Spread, by_batch, figure
from benchmarks.timed_training import keep_study
from overnight import config
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import open_shards
from overnight.engine.pretrain import pretrain
from overnight.errors import TrainingError
from overnight.run_dir.environment import environment

LOW, HIGH = 5e-4, 3e-3
RULES: dict[str, Callable[[float], float]] = {
    "linear": lambda times: LOW * times,
    "square root": lambda times: LOW * math.sqrt(times),
    "fixed low": lambda times: LOW,
    "fixed high": lambda times: HIGH,
}
"""The learning rate, by how many times the batch is that of LOW."""
BLIND = math.log2(256)
"""Bits per character without any knowledge."""


@dataclass(frozen=True)
class Study:
    """What is trained."""

    base: int = 4
    """The batch that LOW belongs to."""
    times: tuple[int, ...] = (16, 64, 256)
    width: int = 256
    length: int = 64
    characters: int = 4 << 20
    """Of every training."""
    validation: int = 2048
    """Windows."""
    seeds: tuple[int, ...] = (1, 2)

    def steps(self, batch: int) -> int:
        """Of a training."""
        return self.characters // (batch * self.length)


TINY = Study(base=2, times=(2, 64), width=16, length=16, characters=1 << 15, validation=16, seeds=(1, 2))


@dataclass(frozen=True)
class Trial:
    """One training and what it reached."""

    rule: str
    batch: int
    lr: float
    seed: int
    bits: float | None
    """Per character, on the validation text; None after a loss that is no number."""
    message: str
    """Of what stopped it, if anything did."""
    seconds: float


def train(study: Study, paths: Sequence[str], data: Path, rule: str, times: int, seed: int) -> Trial:
    """Train once."""
    start, batch, lr = time.perf_counter(), study.base * times, RULES[rule](times)
    bits, message = None, ""
    with tempfile.TemporaryDirectory() as folder:
        tree = recipe(study, paths, data) | {"out": folder, "seed": seed}
        optim = {
            "name": "adamw",
            "lr": lr,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
            "schedule": {"name": "linear", "warmup_ratio": 0.0},
        }
        main = {
            "steps": study.steps(batch),
            "global_batch_size": batch,
            "micro_batch_size": min(batch, 256),
            "seq_len": study.length,
            "optim": optim,
        }
        run = config.build_run(tree | {"phases": {"main": main}})
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            try:
                pretrain(run, Line(nowhere))
            except TrainingError as halt:
                message = str(halt)
        lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        if not message:
            bits = [float(line["byte_loss"]) for line in lines if line["kind"] == "eval"][-1] / math.log(2)
    finite = bits is not None and math.isfinite(bits)
    return Trial(rule, batch, lr, seed, bits if finite else None, message, round(time.perf_counter() - start, 1))


def recipe(study: Study, paths: Sequence[str], data: Path) -> dict[str, object]:
    """A run without its phase."""
    tree = config.to_tree(config.load_run("mlstm-small"))
    return {
        "name": "rules",
        "data": tree["data"] | {"dir": str(data)} | ({"paths": list(paths)} if paths else {}),
        "model": tree["model"] | {"hidden_size": study.width},
        "precision": tree["precision"],
        "compute": {"threads": 1, "device": "cpu"},
        "logging": {"eval_every": 0, "eval_examples": study.validation, "log_every": 50},
        "checkpoint": {"save_every": 1 << 30},
    }


def cell(out: Path, study: Study, paths: Sequence[str], data: Path, rule: str, times: int, seed: int) -> str:
    """A training, unless trials.jsonl has it; returns a line that says what came out."""
    torch.set_num_threads(1)
    found = next((t for t in read(out) if (t.rule, t.batch, t.seed) == (rule, study.base * times, seed)), None)
    if found is None:
        found = train(study, paths, data, rule, times, seed)
        with open(out / "trials.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found)) + "\n")
    told = found.message or f"{found.bits:.3f} bits per byte"
    return f"{rule} at {found.batch}, lr {found.lr:.3g}, seed {seed}: {told}, {found.seconds:.0f} s"


def read(out: Path) -> list[Trial]:
    """The trials so far."""
    path = out / "trials.jsonl"
    return [Trial(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def frequencies(data: Path) -> float:
    """Bits per character of the validation text when only the frequencies of its bytes are known."""
    counts = np.bincount(np.concatenate([shard.tokens for shard in open_shards(data, "valid", verify=False)]), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def spreads(trials: Sequence[Trial]) -> dict[str, dict[int, Spread]]:
    """Bits by rule and batch; infinite where a training diverged."""
    found: dict[str, dict[int, Spread]] = {}
    for rule in RULES:
        for batch in sorted({t.batch for t in trials}):
            bits = [t.bits if t.bits is not None and t.bits < BLIND else math.inf for t in trials if (t.rule, t.batch) == (rule, batch)]
            if bits:
                found.setdefault(rule, {})[batch] = Spread(sum(bits) / len(bits), min(bits), max(bits))
    return found


def table(study: Study, found: dict[str, dict[int, Spread]], frequent: float) -> list[str]:
    """What came out, to read."""

    def shown(spread: Spread | None) -> str:
        if spread is None:
            return "-"
        if not math.isfinite(spread.high):
            return "diverged" if not math.isfinite(spread.low) else f"diverged ({spread.low:.3f} with one seed)"
        return f"{spread.median:.3f} ({spread.low:.3f}–{spread.high:.3f})"

    lines = [
        f"bits per byte of validation text after {study.characters:,} bytes, mean of the seeds {study.seeds} (lowest–highest); "
        f"the frequencies of the bytes alone give {frequent:.3f}",
        "",
        "| batch | steps | " + " | ".join(RULES) + " |",
        "|---" * (2 + len(RULES)) + "|",
    ]
    for times in study.times:
        batch = study.base * times
        cells = [f"{shown(found.get(rule, {}).get(batch))}, lr {of(times):.2g}" for rule, of in RULES.items()]
        lines.append(f"| {batch:,} | {study.steps(batch):,} | " + " | ".join(cells) + " |")
    return lines


def write(out: Path, study: Study, data: Path) -> None:
    """Write summary.json and the picture, and print the table."""
    trials, frequent = read(out), frequencies(data)
    found = spreads(trials)
    lines = table(study, found, frequent)
    print("\n".join(["", *lines]), flush=True)
    tree = {
        "environment": environment(),
        "study": asdict(study),
        "frequencies": frequent,
        "seconds": round(sum(t.seconds for t in trials)),
        "report": lines,
    }
    (out / "summary.json").write_text(json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    draw(out, study)


def draw(out: Path, study: Study) -> None:
    """Draw the bits per byte by rule and batch, unless everything diverged."""
    found, batches = spreads(read(out)), [study.base * times for times in study.times]
    title, unit = "validation bits per byte", f"windows of {study.length} bytes"
    if any(math.isfinite(s.high) for row in found.values() for s in row.values()):
        about = f"a multiplicative LSTM of {study.width} units after {study.characters / 1e6:.1f} MB of reviews"
        (out / "rules.svg").write_text(figure(about, [lambda axes: by_batch(axes, title, unit, batches, found)]), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is not done, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes that take seconds, in --out/tiny")
    parser.add_argument("--draw", action="store_true", help="only draw the picture of --out again")
    parser.add_argument("--workers", type=int, default=2, help="processes, each of one thread")
    parser.add_argument("--paths", nargs="+", default=[], help="other text than that of mlstm-small")
    parser.add_argument("--data", type=Path, default=Path("data/mlstm-small"), help="folder of the prepared text")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-cpu{os.cpu_count()}-batch-rules")
    options = parser.parse_args(arguments)
    study, out = (TINY, options.out / "tiny") if options.tiny else (Study(), options.out)
    if options.draw:
        return draw(out, study)
    # Trials that are there already are of this study or of none.
    same = {name: value for name, value in asdict(study).items() if name not in ("times", "seeds")}
    keep_study(out, {"paths": options.paths, **same})
    run = config.build_run(recipe(study, options.paths, options.data) | {"phases": {"main": {"steps": 1, "global_batch_size": 1}}})
    prepare(run.data, options.data, log=print)
    # The smallest batches take longest: first, so that both processes end together.
    jobs = [(out, study, options.paths, options.data, rule, times, seed) for times in study.times for rule in RULES for seed in study.seeds]
    if options.workers == 1:
        for job in jobs:
            print(cell(*job), flush=True)
    else:
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            for line in pool.map(cell, *zip(*jobs, strict=True)):
                print(line, flush=True)
    write(out, study, options.data)


if __name__ == "__main__":
    main()
