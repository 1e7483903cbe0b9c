"""Pictures of the studies as SVG: what came out against the batch, with a panel for each measure (matplotlib, extra `plots`).

A line is an optimizer or a rule (the median over the seeds) and the band around it their range; layer-wise optimizers are solid, the others
dashed. The studies draw at their end, and again from their own results with `--draw`.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter
from matplotlib.transforms import ScaledTranslation

# Okabe and Ito's colors, which stay apart for the color-blind; yellow is too light for a line.
COLORS = {"LARS": "#0072B2", "LAMB": "#D55E00", "LANS": "#009E73", "AdamW": "#000000", "SGD": "#CC79A7", "Muon": "#56B4E9"}
COLORS |= {"linear": "#D55E00", "square root": "#0072B2", "fixed low": "#009E73", "fixed high": "#000000"}
COLORS |= {
    "run_mlm.py, its defaults": "#000000",
    "run_mlm.py, tuned": "#CC79A7",
    "overnight, BERT as published": "#0072B2",
    "overnight, modern": "#D55E00",
}
DASHED = ("AdamW", "SGD", "Muon", "run_mlm.py, its defaults", "run_mlm.py, tuned")
# Text stays text, and the same values give the same file.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "overnight",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial"],
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#999999",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Spread:
    """The median over the reported seeds, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values, which may be infinite."""
        return cls(statistics.median(values), min(values), max(values))

    def times(self, factor: float) -> Spread:
        """Return all three times a factor above 0."""
        return Spread(factor * self.median, factor * self.low, factor * self.high)


Lines = Mapping[str, Mapping[int, Spread]]
"""By optimizer or rule, and batch; what diverged is infinite."""


def figure(title: str, panels: Sequence[Callable[[Axes], None]]) -> str:
    """Return panels side by side under a title, with one legend for all of them, as SVG."""
    with matplotlib.rc_context(STYLE):
        whole = Figure(figsize=(4.4 * len(panels) + 1.4, 3.9), layout="constrained")
        for axes, draw in zip(whole.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            draw(axes)
        whole.suptitle(title, x=0.01, ha="left", fontsize=12)
        named = {label: handle for axes in whole.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        whole.legend(named.values(), named.keys(), loc="outside right center")
        text = io.StringIO()
        whole.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def study_figure(title: str, unit: str, batches: Sequence[int], accuracy: Lines, loss: Lines, lr: Lines) -> str:
    """Return the three panels of a problem of the large-batch study as SVG.

    Args:
        title: of the problem.
        unit: what a batch counts.
        batches: on the axis of every panel.
        accuracy: percent.
        loss: mean over the validation examples.
        lr: the best learning rates.
    """
    smallest = batches[0]
    relative = {name: {b: r.times(1 / row[smallest].median) for b, r in row.items()} for name, row in lr.items() if smallest in row}
    return figure(
        title,
        [
            lambda axes: by_batch(axes, "test accuracy, %", unit, batches, accuracy),
            lambda axes: by_batch(axes, "test loss", unit, batches, loss),
            lambda axes: by_batch(
                axes, f"best learning rate, times that at {smallest}", unit, batches, relative, {"linear rule": 1.0, "sqrt rule": 0.5}
            ),
        ],
    )


def by_minutes(axes: Axes, title: str, lines: Mapping[str, Mapping[float, Spread]]) -> None:
    """Draw lines over minutes of training, on a logarithmic axis.

    Args:
        axes: to draw on.
        title: of the measure.
        lines: by name and minutes.
    """
    minutes = sorted({m for row in lines.values() for m in row})
    axes.set(title=title, xlabel="minutes of training", xscale="log")
    axes.set_xticks(minutes, [f"{m:g}" for m in minutes])
    axes.xaxis.set_minor_locator(NullLocator())
    for name, row in lines.items():
        dashes, points = "--" if name in DASHED else "-", sorted(row.items())
        at = [m for m, _ in points]
        axes.plot(at, [s.median for _, s in points], dashes, color=COLORS[name], marker="o", markersize=4, linewidth=1.8, label=name)
        axes.fill_between(at, [s.low for _, s in points], [s.high for _, s in points], color=COLORS[name], alpha=0.12, linewidth=0)


def by_batch(axes: Axes, title: str, unit: str, batches: Sequence[int], lines: Lines, rules: Mapping[str, float] | None = None) -> None:
    """Draw lines over the batch; the values are logarithmic where they are more than fivefold apart.

    Args:
        axes: to draw on.
        title, unit, batches: as of `study_figure`.
        lines: with medians that may be infinite, which are left out.
        rules: also draw (batch / smallest batch)^power for each of these powers, by name.
    """
    axes.set(title=title, xlabel=f"batch, {unit}", xscale="log")
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.xaxis.set_minor_locator(NullLocator())
    for (name, power), shade in zip((rules or {}).items(), ("#999999", "#cccccc"), strict=False):
        axes.plot(batches, [(batch / batches[0]) ** power for batch in batches], color=shade, linewidth=5, label=name)
    values = [v for row in lines.values() for r in row.values() for v in (r.low, r.high) if math.isfinite(v)]
    if max(values) > 5 * min(values):
        axes.set_yscale("log")
        decades = math.log10(max(values) / min(values))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    # Room for the lines that are moved apart.
    axes.margins(y=0.1)
    for number, (name, row) in enumerate(lines.items()):
        kept = {batch: spread for batch, spread in row.items() if math.isfinite(spread.median)}
        # The rates are powers of 2, so that lines lie on each other: move them apart, by points.
        shift = 3.0 * (number - (len(lines) - 1) / 2) if rules else 0.0
        place = axes.transData + ScaledTranslation(0, shift / 72, axes.figure.dpi_scale_trans)
        dashes = "--" if name in DASHED else "-"
        medians = [spread.median for spread in kept.values()]
        axes.plot(list(kept), medians, dashes, color=COLORS[name], marker="o", markersize=4, linewidth=1.8, label=name, transform=place)
        banded = {batch: spread for batch, spread in kept.items() if math.isfinite(spread.high)}
        low, high = [r.low for r in banded.values()], [r.high for r in banded.values()]
        axes.fill_between(list(banded), low, high, color=COLORS[name], alpha=0.12, linewidth=0)
