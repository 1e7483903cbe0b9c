"""Fit the law of `overnight/engine/scaling_law.py` to the runs of `benchmarks/scaling_sweep.py`, and say how far off it is where it was not fitted.

    python -m benchmarks.scaling_fit benchmarks/results/DATE-cpu2-scaling            # prints the coefficients to put into the module, and writes fit.json
    python -m benchmarks.scaling_fit DIR --hoffmann                                  # with the shape of theirs, for few runs: only the floor and a scale are fitted
    python -m benchmarks.scaling_fit DIR --plot law.svg                              # also a picture

Robust least squares of the logarithms (Huber's loss at 1e-3, as Hoffmann et al. 2022, arXiv 2203.15556), from many beginnings. Only the `size-*` chains
count, and of them the runs that have left the plateau, on which the loss is that of the frequencies of words and follows no power of anything: those with
--least-accuracy of masked tokens. The error is that of a second fit, without the largest network and without the longest runs, on just these.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from overnight.engine.scaling_law import Law
from overnight.run_dir.atomic import write_json
from overnight.state_files import read_mapping

_CHARACTERS = 4.0
HOFFMANN = Law(floor=1.69, a_scale=406.4, a=0.34, b_scale=410.7 * _CHARACTERS**0.28, b=0.28)
"""Of causal models, in nats a token of about four characters: only its exponents and the ratio of its scales are taken."""
_DELTA = 1e-3
_BEGINNINGS = {"floor": (0.2, 0.5), "a_scale": (10.0, 100.0), "a": (0.2, 0.4), "b_scale": (20.0, 200.0), "b": (0.2, 0.4)}


def fit(points: Sequence[Mapping[str, float]], shape: Law | None = None) -> Law:
    """Return the law that is nearest to some runs.

    Args:
        points: with `parameters`, `characters` and `bits_per_character`.
        shape: a law whose exponents and whose ratio of the scales are kept; only the floor and a common scale are fitted.

    Raises:
        SystemExit: when there are fewer runs than coefficients.
    """
    from scipy.optimize import least_squares

    names = ("floor", "a_scale") if shape else tuple(_BEGINNINGS)
    if len(points) < len(names):
        raise SystemExit(f"{len(points)} runs, and {len(names)} coefficients to fit: train more, or give --hoffmann")
    n, d, loss = (np.array([point[key] for point in points], float) for key in ("parameters", "characters", "bits_per_character"))

    def whole(logs: np.ndarray) -> Law:
        values = dict(zip(names, map(float, np.exp(logs)), strict=True))
        if shape:
            values |= {"a": shape.a, "b": shape.b, "b_scale": values["a_scale"] * shape.b_scale / shape.a_scale}
        return Law(**values)

    def off(logs: np.ndarray) -> np.ndarray:
        law = whole(logs)
        return np.log(law.floor + law.a_scale * n**-law.a + law.b_scale * d**-law.b) - np.log(loss)

    starts = itertools.product(*(_BEGINNINGS[name] for name in names))
    found = [least_squares(off, np.log(start), loss="huber", f_scale=_DELTA, max_nfev=2000) for start in starts]
    return whole(min(found, key=lambda result: result.cost).x)


def errors(law: Law, points: Sequence[Mapping[str, float]]) -> list[float]:
    """Return by what share the law is above (or below) each run."""
    return [law.loss(p["parameters"], p["characters"]) / p["bits_per_character"] - 1 for p in points]


def left_out(points: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the runs that say how well the law goes beyond what it was fitted to: those of the largest network, and the longest of the others."""
    largest, longest = max(p["parameters"] for p in points), max(p["tokens"] for p in points)
    return [p for p in points if p["parameters"] == largest or p["tokens"] == longest]


def mean_error(found: Sequence[float]) -> float:
    """Return the root of the mean square."""
    return math.sqrt(sum(error**2 for error in found) / len(found)) if found else math.nan


def usable(points: Sequence[Mapping[str, Any]], least_accuracy: float) -> list[Mapping[str, Any]]:
    """Return the runs of the sizes that have left the plateau."""
    return [p for p in points if p["name"].startswith("size-") and p["masked_accuracy"] >= least_accuracy]


def plot(law: Law, points: Sequence[Mapping[str, float]], to: Path) -> None:
    """Draw the loss over the text, a line for each size, and the runs as dots."""
    import matplotlib
    from matplotlib.figure import Figure

    from benchmarks.plots import STYLE

    with matplotlib.rc_context(STYLE):
        _draw(figure := Figure(figsize=(7, 4.5)), law, points)
        figure.savefig(to, metadata={"Date": None})


def _draw(figure: Any, law: Law, points: Sequence[Mapping[str, float]]) -> None:
    axes = figure.subplots()
    for number, size in enumerate(sorted({p["parameters"] for p in points})):
        here = [p for p in points if p["parameters"] == size]
        reach = np.geomspace(min(p["characters"] for p in points), 4 * max(p["characters"] for p in points))
        color = f"C{number}"
        axes.plot(reach, [law.loss(size, d) for d in reach], color=color, label=f"{size / 1e6:.1f} M parameters")
        axes.plot([p["characters"] for p in here], [p["bits_per_character"] for p in here], "o", color=color)
    axes.set(xscale="log", xlabel="characters of text", ylabel="bits per character of the validation text")
    axes.legend()
    figure.tight_layout()


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, print, and write fit.json beside the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of a sweep")
    parser.add_argument("--hoffmann", action="store_true", help="keep the exponents and the ratio of the scales of Hoffmann et al.")
    parser.add_argument("--least-accuracy", type=float, default=0.2, help="of masked tokens (0 to 1)")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    points = usable(read_mapping(options.results / "results.json", "run benchmarks.scaling_sweep")["points"], options.least_accuracy)
    shape = HOFFMANN if options.hoffmann else None
    law = fit(points, shape)
    report: dict[str, Any] = {"runs": len(points), "law": dataclasses.asdict(law), "shape_given": options.hoffmann}
    report["error_of_the_fit"] = mean_error(errors(law, points))
    away = left_out(points)
    rest = [p for p in points if p not in away]
    if len(rest) >= (2 if shape else 5):
        report |= {"left_out": len(away), "error_left_out": mean_error(errors(fit(rest, shape), away))}
    write_json(options.results / "fit.json", report)
    print(f"{law}\nfitted to {len(points)} runs, {report['error_of_the_fit']:.2%} off")
    if "left_out" in report:
        print(
            f"fitted to the other {len(rest)}, it is {report['error_left_out']:.2%} off on {len(away)} of the largest network and the longest runs"
        )
    else:
        print("too few runs to leave some out")
    if options.plot:
        plot(law, points, options.plot)


if __name__ == "__main__":
    main()
