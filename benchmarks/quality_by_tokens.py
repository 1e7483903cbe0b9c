"""What all trainings of `time_to_quality.py` add up to: bits per character and BLiMP against the tokens that were read, whatever the machine.

    python -m benchmarks.quality_by_tokens --out DIR       # picture and table of every result that is kept under benchmarks/results

Reads `[abcd]-*-seed*.json` of each folder there. A training that was planned for its time and one of more seeds stand as points of their own; points of one recipe
are joined in the order of their tokens. Validation texts of two versions of the program differ by a few hundred characters of 800,000, which the bits do not show.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from benchmarks.plots import COLORS, DASHED, figure
from benchmarks.time_to_quality import MEASURES
from benchmarks.timed_training import read_results
from overnight.run_dir.atomic import write_whole

RESULTS = Path(__file__).parent / "results"
_COLORS = {**COLORS, "overnight, night-auto, 6 x 320": "#009E73", "overnight, 3 x 192": "#E69F00"}
LENGTH = 128
"""Tokens of a sequence of the peer, which reads full ones."""
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
"""Millions of tokens."""
PAIRS = 100
"""Of a paradigm of BLiMP; the scores of fewer are left out of the picture."""


@dataclass(frozen=True)
class Point:
    """A training: what was trained, the millions of tokens that it read, and its scores."""

    name: str
    millions: float
    minutes: float
    scores: Mapping[str, Any]
    folder: str


def points(results: Path) -> list[Point]:
    """Return all trainings that are kept, by name and tokens."""
    found = []
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        for result in read_results(folder, "[abcd]-*-seed*.json"):
            tokens = result.get("tokens") or result["steps"] * result["settings"]["batch"] * LENGTH
            found.append(Point(result["name"], tokens / 1e6, result["seconds"] / 60, result["scores"], folder.name))
    return sorted(found, key=lambda point: (point.name, point.millions))


def drawn(axes: Axes, measure: str, every: Iterable[Point]) -> None:
    """Draw a measure against tokens, on a logarithmic axis."""
    title, _, unit = MEASURES[measure]
    axes.set(title=title, xlabel="million tokens read", xscale="log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.xaxis.set_minor_locator(NullLocator())
    rows: dict[str, list[tuple[float, float]]] = {}
    for point in every:
        value = point.scores.get(measure)
        if value is not None and not (measure == "blimp" and point.scores["blimp_pairs"] and point.scores["blimp_pairs"] < PAIRS):
            rows.setdefault(point.name, []).append((point.millions, value * unit))
    for name, row in rows.items():
        dashes, color = "--" if name in DASHED else "-", _COLORS.get(name)
        axes.plot(*zip(*row, strict=True), dashes, color=color, marker="o", markersize=4, linewidth=0.8, label=name)


def table(every: Iterable[Point]) -> Iterator[str]:
    """Yield a table of all trainings in Markdown."""
    yield "| | million tokens | minutes | " + " | ".join(title for title, _, _ in MEASURES.values()) + " | in |"
    yield "|---" * (4 + len(MEASURES)) + "|"
    for point in every:
        cells = [f"{point.scores.get(measure, math.nan) * unit:{form}}" for measure, (_, form, unit) in MEASURES.items()]
        yield f"| {point.name} | {point.millions:.1f} | {point.minutes:.0f} | {' | '.join(cells)} | {point.folder} |"


def main() -> None:
    """Write the picture and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the picture, tokens.svg")
    out = parser.parse_args().out
    every = points(RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    panels = [lambda axes, measure=measure: drawn(axes, measure, every) for measure in ("bits_per_character", "blimp")]
    write_whole(out / "tokens.svg", [figure("Quality against the tokens that were read, all kept trainings", panels).encode()])
    print("\n".join(table(every)))


if __name__ == "__main__":
    main()
