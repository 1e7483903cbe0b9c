"""Does it help to predict the stars of a review as well as its bytes? The auxiliary objective of Puri et al. 2018, with it and without.

    OVERNIGHT_DATA=... python -m benchmarks.auxiliary      # one thread

A multiplicative LSTM of 256 units reads 6 MiB of Amazon's music reviews, windows of 64 bytes, 64 streams, Adam; with `label_weight` it also
predicts the stars from the cell state at the end of each review (squared error; stars of the validation reviews against those of always saying
the mean of the training reviews). Then the frozen cell state is evaluated on binary SST as `overnight linear-probe` does. Same seeds, data and
order for all weights. Into --out go trials.jsonl and summary.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch

from benchmarks.timed_training import keep_study
from overnight import config
from overnight.byte_lm.features import extract_features
from overnight.byte_lm.linear_probe import ProbeTask, read_probe_task
from overnight.byte_lm.logistic import fit
from overnight.config import LinearProbe, Run
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import open_shards
from overnight.engine.pretrain import pretrain
from overnight.interop.byte_models import load_byte_model
from overnight.run_dir.environment import environment

REVIEWS, SST = "$OVERNIGHT_DATA/amazon/reviews_Digital_Music_5.first6908.json", "$OVERNIGHT_DATA/sst"
WEIGHTS, SEEDS = (0.0, 0.1, 1.0), (1, 2, 3)


@dataclass(frozen=True)
class Trial:
    """One training and what it reached."""

    weight: float
    seed: int
    bits: float
    """Per character, on the validation text."""
    error: float | None
    """Root of the mean squared error of the stars of the validation reviews."""
    accuracy: float
    """Of a regression on the cell state, on SST's test rows."""
    seconds: float


def recipe(paths: Sequence[str], data: Path, out: Path, weight: float, seed: int, width: int, characters: int) -> Run:
    """A training."""
    optim = {"name": "adamw", "lr": 3e-3, "eps": 1e-8, "weight_decay": 0.0, "schedule": {"name": "linear", "warmup_ratio": 0.02}}
    phase = {
        "steps": max(1, characters // (64 * 64)),
        "global_batch_size": 64,
        "micro_batch_size": 64,
        "seq_len": 64,
        "label_weight": weight,
        "optim": optim,
    }
    tree = {
        "name": "auxiliary",
        "seed": seed,
        "out": str(out),
        "data": {
            "tokenizer": "bytes",
            "paths": list(paths),
            "dir": str(data),
            "field": "reviewText",
            "label": "overall",
            "min_chars": 1,
            "valid_fraction": 0.05,
        },
        "model": {"kind": "mlstm", "num_layers": 1, "hidden_size": width},
        "phases": {"main": phase},
        "logging": {"eval_every": 0, "eval_examples": 2048, "log_every": 100},
        "checkpoint": {"save_every": 1 << 30},
        "compute": {"threads": 1, "device": "cpu"},
    }
    return config.build_run(tree)


def trial(run: Run, problem: ProbeTask, weight: float) -> Trial:
    """Train, and evaluate the features."""
    start = time.perf_counter()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        pretrain(run, Line(nowhere))
    held = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines() if '"eval"' in line][-1]
    features = extract_features(load_byte_model(run.run_dir)[0], problem.documents, "cell", torch.float32)
    part = {name: (features[rows], problem.classes[rows]) for name, rows in problem.parts[run.seed].items()}
    accuracy = fit(part["train"], part["valid"], len(problem.labels), run.seed).accuracy(*part["test"])
    error = math.sqrt(held["label_loss"]) if weight else None
    return Trial(weight, run.seed, held["byte_loss"] / math.log(2), error, accuracy, round(time.perf_counter() - start, 1))


def labels_of(data: Path, split: str) -> np.ndarray:
    """Return the labels of a prepared split (rows)."""
    return np.concatenate([shard.labels for shard in open_shards(data, split, verify=False) if shard.labels is not None])


def blind(data: Path) -> float:
    """Root of the mean squared error of the validation stars when all are said to be the mean of the training reviews."""
    train, valid = labels_of(data, "train"), labels_of(data, "valid")
    return float(np.sqrt(np.nanmean((valid - np.nanmean(train)) ** 2)))


def report(trials: Sequence[Trial], mean: float) -> list[str]:
    """A table of what came out."""

    def spread(values: Sequence[float], form: str) -> str:
        return f"{statistics.mean(values):{form}} ({min(values):{form}}–{max(values):{form}})"

    lines = [
        f"mean of {len({t.seed for t in trials})} seeds (lowest–highest); stars off by {mean:.3f} when all are said to be the mean",
        "",
        "| weight of the stars | bits per byte | stars off by | SST, % |",
        "|---|---|---|---|",
    ]
    for weight in sorted({t.weight for t in trials}):
        here = [t for t in trials if t.weight == weight]
        errors = [t.error for t in here if t.error is not None]
        told = spread(errors, ".3f") if errors else "-"
        lines.append(
            f"| {weight:g} | {spread([t.bits for t in here], '.3f')} | {told} | {spread([100 * t.accuracy for t in here], '.1f')} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is not done, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", nargs="+", default=[REVIEWS], help="reviews: JSON lines with reviewText and overall")
    parser.add_argument("--sst", default=SST, help="folder of binary SST")
    parser.add_argument("--data", type=Path, default=Path("data/auxiliary"), help="folder of the prepared text")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--characters", type=int, default=6 << 20)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-cpu{os.cpu_count()}-auxiliary")
    options = parser.parse_args(arguments)
    # Trials that are there already are of this study or of none.
    keep_study(options.out, {name: getattr(options, name) for name in ("paths", "sst", "width", "characters")})
    log = options.out / "trials.jsonl"
    trials = [Trial(**json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    problem = read_probe_task(LinearProbe(task="sst", path=options.sst, seeds=list(options.seeds)))
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for weight in WEIGHTS:
                if any((t.seed, t.weight) == (seed, weight) for t in trials):
                    continue
                out = Path(folder) / f"{seed}-{weight}"
                run = recipe(options.paths, options.data, out, weight, seed, options.width, options.characters)
                prepare(run.data, options.data, log=lambda words: None)
                trials.append(found := trial(run, problem, weight))
                with log.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
                print(found, flush=True)
    mean = blind(options.data)
    lines = report(trials, mean)
    print("\n".join(["", *lines]))
    summary = {"environment": environment(), "width": options.width, "characters": options.characters, "mean": mean, "report": lines}
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
