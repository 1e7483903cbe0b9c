"""Pictures of the studies as SVG: what came out against the batch, with a panel for each measure.

A line is an optimizer or a rule (the median over the seeds) and the band around it their range; layer-wise optimizers are solid, the others
dashed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Okabe and Ito's colours, which stay apart for the colour-blind; yellow is too light for a line.
COLOURS = {"LARS": "#0072B2", "LAMB": "#D55E00", "LANS": "#009E73", "AdamW": "#000000", "SGD": "#CC79A7", "Muon": "#56B4E9"}
COLOURS |= {"linear": "#D55E00", "square root": "#0072B2", "fixed low": "#009E73", "fixed high": "#000000"}
DASHED = ("AdamW", "SGD", "Muon")
GREY, LIGHT = "#666666", "#e4e4e4"
WIDTH, HEIGHT, LEFT, TOP, PITCH = 300, 270, 64, 62, 430
"""Of a panel's frame (px), where the first begins, and from one to the next."""


@dataclass(frozen=True)
class Spread:
    """The median over the reported seeds, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of values, which may be infinite."""
        return cls(statistics.median(values), min(values), max(values))

    def times(self, factor: float) -> Spread:
        """All three times a factor above 0."""
        return Spread(factor * self.median, factor * self.low, factor * self.high)


Lines = Mapping[str, Mapping[int, Spread]]
"""By optimizer or rule, and batch; what diverged is infinite."""


@dataclass(frozen=True)
class Axis:
    """Values to pixels.

    Args:
        low, high: values at its ends.
        start, end: pixels of the ends.
        log: logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        """The pixel of a value; values beyond the ends are at the ends."""
        scale = math.log if self.log else float
        share = (scale(min(max(value, self.low), self.high)) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values inside it."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            few = math.log10(self.high / self.low) < 3
            values = [m * 10.0**d for d in decades for m in ((1, 2, 5) if few else (1,))]
        else:
            rough = (self.high - self.low) / 7
            power = 10.0 ** math.floor(math.log10(rough))
            step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
            values = [step * i for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [value for value in values if self.low <= value <= self.high]


def picture(title: str, unit: str, batches: Sequence[int], accuracy: Lines, loss: Lines, lr: Lines) -> str:
    """The three panels of a problem of the large-batch study.

    Args:
        title: of the problem.
        unit: what a batch counts.
        batches: on the axis of every panel.
        accuracy: percent.
        loss: mean over the held-out examples.
        lr: the best learning rates.
    """
    smallest = batches[0]
    relative = {name: {b: r.times(1 / row[smallest].median) for b, r in row.items()} for name, row in lr.items() if smallest in row}
    rules = {"linear rule": 1.0, "sqrt rule": 0.5}
    parts = [
        panel(0, "test accuracy, %", unit, batches, accuracy),
        panel(1, "test loss", unit, batches, loss),
        panel(2, f"best learning rate, times that at {smallest}", unit, batches, relative, rules),
    ]
    return sheet(title, parts)


def sheet(title: str, panels: Sequence[str]) -> str:
    """Panels side by side on a white ground."""
    width, height = LEFT + len(panels) * PITCH - 40, TOP + HEIGHT + 56
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    style = 'font-family="Helvetica, Arial, sans-serif" font-size="12">'
    ground = f'<rect width="{width}" height="{height}" fill="white"/>' + text(LEFT, 22, title, size=15)
    return "\n".join([head + style, ground, *panels, "</svg>\n"])


def panel(place: int, title: str, unit: str, batches: Sequence[int], lines: Lines, rules: Mapping[str, float] | None = None) -> str:
    """One frame with its lines, labelled at their right ends; logarithmic where the values are more than fivefold apart.

    Args:
        place: 0 for the first from the left.
        rules: also draw (batch / smallest batch)^power for each of these powers, by name.
    """
    ruled = {name: {b: Spread.of([(b / batches[0]) ** power]) for b in batches} for name, power in (rules or {}).items()}
    values = [v for row in [*lines.values(), *ruled.values()] for r in row.values() for v in (r.low, r.high) if math.isfinite(v)]
    low, high = min(values), max(values)
    log = high > 5 * low
    room = (high / low) ** 0.05 if log else (high - low) * 0.05
    left = LEFT + place * PITCH
    y = Axis(low / room if log else low - room, high * room if log else high + room, TOP + HEIGHT, TOP, log)
    x = Axis(batches[0] / 1.15, batches[-1] * 1.15, left, left + WIDTH, True)
    found = [text(left, TOP - 12, title, size=13)]
    for value in y.ticks():
        found += [line([(left, y.at(value)), (left + WIDTH, y.at(value))], LIGHT), text(left - 8, y.at(value) + 4, f"{value:.4g}", "end")]
    for batch in batches:
        found += [
            line([(x.at(batch), TOP), (x.at(batch), TOP + HEIGHT)], LIGHT),
            text(x.at(batch), TOP + HEIGHT + 18, f"{batch:,}", "middle"),
        ]
    found.append(text(left + WIDTH / 2, TOP + HEIGHT + 40, f"batch, {unit}", "middle"))
    found += [line([(x.at(b), y.at(r.median)) for b, r in row.items()], "#bbbbbb", width=6) for row in ruled.values()]
    ends: dict[str, float] = {name: y.at(row[batches[-1]].median) for name, row in ruled.items()}
    for number, (name, row) in enumerate(lines.items()):
        kept = {b: r for b, r in row.items() if math.isfinite(r.median)}
        # The rates are powers of 2, so that lines lie on each other: move them apart.
        shift = 3.5 * (number - (len(lines) - 1) / 2) if rules else 0.0
        found.append(curve([(x.at(b), y.at(r.median) + shift, y.at(r.low) + shift, y.at(r.high) + shift) for b, r in kept.items()], name))
        if batches[-1] in kept:
            ends[name] = y.at(kept[batches[-1]].median) + shift
    for name, (end, label) in spaced(ends).items():
        colour = COLOURS.get(name, GREY)
        found += [
            line([(x.at(batches[-1]) + 12, end), (left + WIDTH + 14, label)], colour),
            text(left + WIDTH + 18, label + 4, name, colour=colour),
        ]
    return "\n".join(found)


def curve(points: Sequence[tuple[float, float, float, float]], name: str) -> str:
    """A band, a line over it and dots, from the pixels x, median, low and high."""
    colour = COLOURS[name]
    border = [(x, high) for x, _, _, high in points] + [(x, low) for x, _, low, _ in reversed(points)]
    band = f'<polygon points="{path(border)}" fill="{colour}" fill-opacity="0.09"/>'
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y, _, _ in points]
    return "\n".join([band, line([(x, y) for x, y, _, _ in points], colour, 2.2, name in DASHED), *dots])


def spaced(ends: Mapping[str, float], apart: float = 15.0) -> dict[str, tuple[float, float]]:
    """For each label its line's end and a place (px) near it, at least `apart` from the others' and inside the frame."""
    order = sorted(ends, key=ends.__getitem__)
    places: dict[str, float] = {}
    for name in order:
        places[name] = max(ends[name], max(places.values(), default=-math.inf) + apart)
    bottom = float(TOP + HEIGHT)
    for name in reversed(order):
        places[name] = min(places[name], bottom)
        bottom = places[name] - apart
    return {name: (ends[name], places[name]) for name in order}


def path(points: Sequence[tuple[float, float]]) -> str:
    """Points as SVG writes them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def line(points: Sequence[tuple[float, float]], colour: str, width: float = 1.0, dashed: bool = False) -> str:
    """A line through points (px)."""
    dash = ' stroke-dasharray="7 4"' if dashed else ""
    return f'<polyline points="{path(points)}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{dash}/>'


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, colour: str = "#222222") -> str:
    """Words at a point (px)."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{words}</text>'
