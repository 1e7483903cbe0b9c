"""Fit the law of `overnight/engine/scaling_law.py` to runs of several sizes and lengths, and say how far off it is where it was not fitted.

    python -m benchmarks.scaling_fit FOLDER ... --out DIR       # prints the coefficients to put into the module, and writes DIR/fit.json
    python -m benchmarks.scaling_fit FOLDER ... --test OTHER    # also how far off it is for runs that are not fitted
    python -m benchmarks.scaling_fit FOLDER --hoffmann          # with the shape of theirs, for few runs: only the floor and a scale are fitted

A folder has the runs of `benchmarks/scaling_sweep.py` (of `results.json` the `size-*` chains) or the trainings of `benchmarks/time_to_quality.py` (`d-*.json`). Those were
scored on other parts of the validation books, so a factor for each sweep is fitted as well. Left out are runs that have not left the plateau, on which the loss
is that of the frequencies of words and follows no power of anything: those with less than --least-accuracy of masked tokens.

Robust least squares of the logarithms (Huber's loss at 1e-3, as Hoffmann et al. 2022, arXiv 2203.15556), from many beginnings. Of a sweep the error is also that of a second
fit, without the largest network and without the longest runs, on just these.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.timed_training import read_results
from overnight import config
from overnight.config import ModernBertConfig
from overnight.engine.scaling_law import Law, layer_parameters
from overnight.run_dir.atomic import write_json
from overnight.state_files import read_mapping

_CHARACTERS = 4.0
HOFFMANN = Law(floor=1.69, a_scale=406.4, a=0.34, b_scale=410.7 * _CHARACTERS**0.28, b=0.28)
"""Of causal models, in nats a token of about four characters: only its exponents and the ratio of its scales are taken."""
_BOOKS = 4.05
"""Characters of a token of the books with a vocabulary of 8,192, as the sweep has them."""
_DELTA = 1e-3
_BEGINNINGS = {"floor": (0.2, 0.5), "a_scale": (10.0, 100.0), "a": (0.2, 0.4), "b_scale": (20.0, 200.0), "b": (0.2, 0.4)}


class Fit(NamedTuple):
    """What was fitted."""

    law: Law
    factors: dict[str, float]
    """By which the bits of runs on another text than the first are lower or higher than the law."""


def fit(points: Sequence[Mapping[str, Any]], shape: Law | None = None) -> Fit:
    """Return the law that is nearest to some runs.

    Args:
        points: with `parameters`, `characters`, `bits_per_character`, and, where they were scored on several, their `text`; the law is that of the first.
        shape: a law whose exponents and whose ratio of the scales are kept; only the floor and a common scale are fitted.

    Raises:
        SystemExit: when there are fewer runs than coefficients.
    """
    from scipy.optimize import least_squares

    names = ("floor", "a_scale") if shape else tuple(_BEGINNINGS)
    others = list(dict.fromkeys(_text(point) for point in points))[1:]
    if len(points) < len(names) + len(others):
        raise SystemExit(f"{len(points)} runs, and {len(names) + len(others)} coefficients to fit: train more, or give --hoffmann")
    n, d, loss = (np.array([point[key] for point in points], float) for key in ("parameters", "characters", "bits_per_character"))
    of_others = np.array([[_text(point) == other for other in others] for point in points], float).reshape(len(points), len(others))

    def whole(logs: np.ndarray) -> Law:
        values = dict(zip(names, map(float, np.exp(logs[: len(names)])), strict=True))
        if shape:
            values |= {"a": shape.a, "b": shape.b, "b_scale": values["a_scale"] * shape.b_scale / shape.a_scale}
        return Law(**values)

    def off(logs: np.ndarray) -> np.ndarray:
        law = whole(logs)
        return np.log(law.floor + law.a_scale * n**-law.a + law.b_scale * d**-law.b) + of_others @ logs[len(names) :] - np.log(loss)

    starts = [[*np.log(start), *(0.0 for _ in others)] for start in itertools.product(*(_BEGINNINGS[name] for name in names))]
    best = min((least_squares(off, start, loss="huber", f_scale=_DELTA, max_nfev=4000) for start in starts), key=lambda found: found.cost).x
    return Fit(whole(best), dict(zip(others, map(float, np.exp(best[len(names) :])), strict=True)))


def _text(point: Mapping[str, Any]) -> str:
    return str(point.get("text", ""))


def errors(found: Fit, points: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return by what share the law is above (or below) each run."""
    return [
        found.law.loss(p["parameters"], p["characters"]) * found.factors.get(_text(p), 1.0) / p["bits_per_character"] - 1 for p in points
    ]


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


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the runs of a folder: of a sweep as they are, of trainings with the parameters of their recipe's network and the characters of their tokens.

    Raises:
        SystemExit: when it has neither.
    """
    if (folder / "results.json").exists():
        return [{**point, "text": folder.name} for point in read_mapping(folder / "results.json", "run benchmarks.scaling_sweep")["points"]]
    found = []
    for result in read_results(folder, "d-*-seed*.json"):
        scores = {name: result["scores"][name] for name in ("bits_per_character", "masked_accuracy")}
        known = {"name": "size-training", "tokens": result["tokens"], "characters": result["tokens"] * _BOOKS}
        found.append({**known, "parameters": result.get("parameters") or _parameters(result["recipe"]), **scores})
    if not found:
        raise SystemExit(f"{folder}: has neither results.json of a sweep nor d-*.json of trainings")
    return found


def _parameters(recipe: str) -> int:
    model = config.load_run(recipe).model
    assert isinstance(model, ModernBertConfig), recipe
    return layer_parameters(model)


def plot(found: Fit, points: Sequence[Mapping[str, Any]], to: Path) -> None:
    """Draw the loss over the text, a line for each size, and the runs as dots, on the text of the law."""
    import matplotlib
    from matplotlib.figure import Figure

    from benchmarks.plots import STYLE

    with matplotlib.rc_context(STYLE):
        _draw(figure := Figure(figsize=(7, 4.5)), found, points)
        figure.savefig(to, metadata={"Date": None})


def _draw(figure: Any, found: Fit, points: Sequence[Mapping[str, Any]]) -> None:
    axes, law = figure.subplots(), found.law
    for number, size in enumerate(sorted({p["parameters"] for p in points})):
        here = [p for p in points if p["parameters"] == size]
        reach = np.geomspace(min(p["characters"] for p in points), 4 * max(p["characters"] for p in points))
        color = f"C{number}"
        axes.plot(reach, [law.loss(size, d) for d in reach], color=color, label=f"{size / 1e6:.1f} M parameters")
        bits = [p["bits_per_character"] / found.factors.get(_text(p), 1.0) for p in here]
        axes.plot([p["characters"] for p in here], bits, "o", color=color)
    axes.set(xscale="log", xlabel="characters of text", ylabel="bits per character of the validation text")
    axes.legend()
    figure.tight_layout()


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit, print, and write fit.json and a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", type=Path, nargs="+", metavar="FOLDER", help="of a sweep, or of trainings; the law is for the text of the first"
    )
    parser.add_argument("--hoffmann", action="store_true", help="keep the exponents and the ratio of the scales of Hoffmann et al.")
    parser.add_argument("--least-accuracy", type=float, default=0.2, help="of masked tokens (0 to 1)")
    parser.add_argument(
        "--test",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="runs on the text of the first that are not fitted; once for each folder",
    )
    parser.add_argument("--out", type=Path, help="folder of fit.json and law.svg; default the first FOLDER, without a picture")
    options = parser.parse_intermixed_args(arguments)
    points = usable([point for folder in options.results for point in runs_of(folder)], options.least_accuracy)
    shape = HOFFMANN if options.hoffmann else None
    found = fit(points, shape)
    report: dict[str, Any] = {
        "runs": len(points),
        "law": dataclasses.asdict(found.law),
        "factors": found.factors,
        "shape_given": options.hoffmann,
    }
    report |= {"folders": [folder.name for folder in options.results], "error_of_the_fit": mean_error(errors(found, points))}
    away = left_out(points)
    rest = [p for p in points if p not in away]
    if len(rest) >= (2 if shape else 5) and len({_text(p) for p in points}) == 1:
        report |= {"left_out": len(away), "error_left_out": mean_error(errors(fit(rest, shape), away))}
    print(f"{found.law}\nfitted to {len(points)} runs, {report['error_of_the_fit']:.2%} off")
    for text, factor in found.factors.items():
        print(f"bits on the text of {text} are {factor:.3f} times those on the first")
    if "left_out" in report:
        print(
            f"fitted to the other {len(rest)}, it is {report['error_left_out']:.2%} off on {len(away)} of the largest network and the longest runs"
        )
    tests = [point for folder in options.test for point in runs_of(folder)]
    for point, error in zip(tests, errors(found, tests), strict=True):
        print(
            f"not fitted: {point['parameters'] / 1e6:.1f} M parameters, {point['tokens'] / 1e6:.0f} M tokens: "
            f"{point['bits_per_character']:.3f} bits, the law is {error:+.1%} off"
        )
    report["tests"] = [{**point, "error": error} for point, error in zip(tests, errors(found, tests), strict=True)]
    to = options.out or options.results[0]
    to.mkdir(parents=True, exist_ok=True)
    write_json(to / "fit.json", report)
    if options.out:
        plot(found, points, to / "law.svg")


if __name__ == "__main__":
    main()
