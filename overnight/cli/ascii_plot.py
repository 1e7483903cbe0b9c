"""Curves over phases, drawn with characters: panels one below the other over one axis of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LEAST_ROOM = 40


@dataclass(frozen=True)
class Stretch:
    """The part of the axis that one phase takes."""

    steps: int
    labels: Sequence[str]
    """Lines below the axis, as many for every stretch."""


@dataclass(frozen=True)
class Panel:
    """One filled curve."""

    title: str
    values: Sequence[Sequence[float]]
    """Of each stretch, at evenly spaced steps (0 or more)."""
    top: float
    """Value at the upper edge."""
    ticks: tuple[str, str]
    """Labels of the upper edge and of half of it."""
    height: int
    """Lines."""


def draw(stretches: Sequence[Stretch], panels: Sequence[Panel], width: int = 72, room: int = 10_000) -> str:
    """Return the panels and their axis; the stretches share the width by their steps, but each has room for its labels.

    Args:
        width: of the curves (characters), unless the labels need more.
        room: for the longest line, as a terminal would break it; where there is too little, nothing is returned.
    """
    margin = max(len(tick) for panel in panels for tick in panel.ticks)
    widths = _widths(stretches, min(width, room - margin - 2))
    if margin + 2 + sum(widths) > room or room < _LEAST_ROOM:
        return ""
    lines: list[str] = []
    for panel in panels:
        columns = [level for values, share in zip(panel.values, widths, strict=True) for level in _levels(values, share, panel)]
        ticks = dict(zip((0, panel.height // 2), panel.ticks, strict=True))
        lines += [""] * bool(lines) + [panel.title]
        for row in range(panel.height):
            filled = "".join(_EIGHTHS[min(8, max(0, level - 8 * (panel.height - 1 - row)))] for level in columns)
            lines.append(f"{ticks.get(row, ''):>{margin}} {'┤' if row in ticks else '│'}{filled}".rstrip())
        lines.append(f"{'0':>{margin}} └{''.join('┬' + '─' * (share - 1) for share in widths)}")
    for texts in zip(*(stretch.labels for stretch in stretches), strict=True):
        lines.append((" " * (margin + 2) + "".join(text.ljust(share) for text, share in zip(texts, widths, strict=True))).rstrip())
    return "\n".join(lines)


def _widths(stretches: Sequence[Stretch], width: int) -> list[int]:
    """Return the columns of each stretch: by its steps, and no fewer than its labels need."""
    shares = {i: max(map(len, stretch.labels)) + 2 for i, stretch in enumerate(stretches)}
    free = list(shares)
    while free:
        left = width - sum(share for i, share in shares.items() if i not in free)
        steps = sum(stretches[i].steps for i in free)
        wide = [i for i in free if left * stretches[i].steps >= shares[i] * steps]
        if wide == free:
            shares |= {i: left * stretches[i].steps // steps for i in free}
            break
        free = wide
    return list(shares.values())


def _levels(values: Sequence[float], columns: int, panel: Panel) -> list[int]:
    """Return the eighths of a line that each column is filled, by its highest value; at least one where that is above 0."""
    found = []
    for column in range(columns):
        first, end = column * len(values) // columns, (column + 1) * len(values) // columns
        highest = max(values[first : max(first + 1, end)])
        found.append(max(round(highest / panel.top * 8 * panel.height), int(highest > 0)))
    return found
