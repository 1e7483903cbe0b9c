"""How long liblinear and Newton's method take over a network's features, and how far from the optimum they end.

    OVERNIGHT_DATA=... python -m benchmarks.regression sst --from RUN      # keys of the recipe may follow: --compute.threads=1

RUN is a run folder of a byte model with this task in `linear_probe`. The features are those of `overnight linear-probe`; both fit the training
rows at every strength of the published grid, in turns. Distance: the farthest that a slope of the loss is from an optimum's, in units of the
penalty. liblinear takes 100 steps at most, as published.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from overnight.byte_lm.features import extract_features
from overnight.byte_lm.linear_probe import read_probe_task
from overnight.byte_lm.logistic import STRENGTHS, Classifier, by_liblinear, by_newton, distance
from overnight.config import ByteRun, stored_run
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.interop.byte_models import load_byte_model
from overnight.run_dir.environment import environment


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, print a line for each strength, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="a task of `linear_probe` in the run's recipe, of two classes")
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="RUN")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options, overrides = parser.parse_known_args(arguments)
    run = stored_run(options.source, overrides)
    if not isinstance(run, ByteRun) or options.task not in run.linear_probe:
        raise SystemExit(
            f"{options.source} has no linear probe {options.task!r}; it has: {', '.join(getattr(run, 'linear_probe', ())) or 'none'}"
        )
    set_up_machine(run)
    spec = run.linear_probe[options.task]
    problem, seed = read_probe_task(spec), spec.seeds[0]
    x = extract_features(load_byte_model(options.source)[0], problem.documents, spec.features, DTYPES[run.precision]).astype(np.float64)
    rows, y = problem.parts[seed], problem.classes == 1
    train, valid = rows["train"], rows["valid"]
    print(f"{len(train):,} rows of {x.shape[1]:,} features; seconds, distance from the optimum and validation accuracy of each")
    fits = {"liblinear": by_liblinear(x[train], y[train], seed), "newton": by_newton(x[train], y[train])}
    lines = []
    for strength in STRENGTHS:
        line: dict[str, float] = {"c": strength}
        for name, path in fits.items():
            start = time.perf_counter()
            w = next(path)
            line[f"{name} seconds"] = round(time.perf_counter() - start, 2)
            found = Classifier(strength, w[None, :-1], w[-1:], 0.0)
            line |= {f"{name} distance": distance(x[train], y[train], strength, w), f"{name} accuracy": found.accuracy(x[valid], y[valid])}
        lines.append(line)
        print("  ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)
    total = {name: round(sum(line[f"{name} seconds"] for line in lines), 1) for name in fits}
    print(f"in all: {total['liblinear']} s by liblinear, {total['newton']} s by Newton's method")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"environment": environment(), "rows": len(train), "features": x.shape[1], "lines": lines, "seconds": total}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
