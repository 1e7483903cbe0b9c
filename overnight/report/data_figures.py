"""The charts of a prepared folder, in the form of those of a run (:mod:`figures`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from overnight.corpus.statistics import Lengths, Statistics
from overnight.display import number, plural
from overnight.report.figures import AXIS, LAYOUT, PALE, PALETTE, Chart

# Ranges of lengths of documents in each power of ten, and lengths of sentences that have a bar of their own.
_PER_DECADE, _SENTENCES = 10, 100
# Documents or sentences that another split must have, to be drawn beside the training part.
_ENOUGH = 200
# Points of the curve of ranks.
_RANKS = 200


def charts(found: Statistics, is_bytes: bool, sources: Sequence[str]) -> Iterator[Chart]:
    """Yield the charts for which there are values.

    Args:
        found: of the folder.
        is_bytes: tokens are bytes, which have no sentences.
        sources: names of the sources, by their numbers.
    """
    unit = "bytes" if is_bytes else "tokens"
    yield _documents({split: each.documents for split, each in found.splits.items()}, unit)
    if not is_bytes:
        yield _sentences({split: each.sentences for split, each in found.splits.items()})
    if "train" in found.splits:
        yield _ranks(found.splits["train"].token_counts, is_bytes)
    if len({source for source, _ in found.sources}) > 1:
        yield _sources(found, sources, unit)


def _documents(lengths: Mapping[str, Lengths], unit: str) -> Chart:
    longest = max(each.longest for each in lengths.values())
    edges = sorted({round(10 ** (step / _PER_DECADE)) for step in range(math.ceil(_PER_DECADE * math.log10(longest + 1)) + 2)})
    low = next(i for i in range(len(edges) - 1) if any(each.within([0, edges[i + 1]])[0] for each in lengths.values()))
    edges = edges[low:]
    texts = [f"{low:,} to {high - 1:,} {unit}" for low, high in itertools.pairwise(edges)]
    middles = [math.sqrt(low * high) for low, high in itertools.pairwise(edges)]
    widths = [0.9 * (high - low) for low, high in itertools.pairwise(edges)]
    figure = _figure(
        [
            _shares(split, each.within([float(edge) for edge in edges]), each.number, middles, texts, widths)
            for split, each in lengths.items()
            if split == "train" or each.number >= _ENOUGH
        ],
        {"type": "log", "dtick": 1, "ticksuffix": f" {unit}", "showticksuffix": "last", "exponentformat": "none", "tickformat": ",d"},
        {"ticksuffix": " %"},
    )
    return Chart("Length of documents", f"by {unit}", figure)


def _sentences(lengths: Mapping[str, Lengths]) -> Chart:
    edges = [float(edge) for edge in (*range(1, _SENTENCES + 1), math.inf)]
    texts = [f"{plural(length, 'token')}{' or more' if length == _SENTENCES else ''}" for length in range(1, _SENTENCES + 1)]
    figure = _figure(
        [
            _shares(split, each.within(edges), each.number, list(range(1, _SENTENCES + 1)), texts, [0.9] * _SENTENCES)
            for split, each in lengths.items()
            if split == "train" or each.number >= _ENOUGH
        ],
        {"ticksuffix": " tokens", "showticksuffix": "last"},
        {"ticksuffix": " %"},
    )
    return Chart("Length of sentences", f"by tokens; the last bar: {_SENTENCES} or more", figure)


def _shares(split: str, counts: list[int], total: int, x: list[Any], texts: list[str], widths: list[float]) -> Any:
    """Return bars of the training part, and a line of another one."""
    y = [100 * count / max(total, 1) for count in counts]
    hover = "%{text}: %{y:.2f} %"
    if split == "train":
        return go.Bar(
            x=x, y=y, width=widths, text=texts, textposition="none", name=split, marker={"color": PALETTE[0]}, hovertemplate=hover
        )
    line = {"color": PALETTE[1] if split == "valid" else PALETTE[2], "width": 1.5, "shape": "hvh"}
    return go.Scatter(x=x, y=y, text=texts, name=split, mode="lines", line=line, hovertemplate=hover)


def _ranks(counts: np.ndarray, is_bytes: bool) -> Chart:
    ordered = np.sort(counts[counts > 0])[::-1]
    ranks = np.unique(np.geomspace(1, len(ordered), _RANKS).astype(np.int64)) if len(ordered) else np.zeros(0, np.int64)
    share = 100 * np.cumsum(ordered) / max(int(ordered.sum()), 1)
    curve = go.Scatter(
        x=ranks.tolist(),
        y=ordered[ranks - 1].tolist(),
        customdata=share[ranks - 1].tolist(),
        mode="lines",
        line={"color": PALETTE[0], "width": 2},
        hovertemplate="%{y:,} times; up to here %{customdata:.1f} % of the text<extra></extra>",
    )
    what = "byte" if is_bytes else "token"
    axis = {"type": "log", "dtick": 1, "exponentformat": "none", "tickformat": ",d"}
    figure = _figure([curve], {**axis, "tickprefix": "rank ", "showtickprefix": "first"}, {**axis, "tickformat": "~s"})
    return Chart(f"How often each {what} occurs", "in the training part, by rank", figure)


def _sources(found: Statistics, sources: Sequence[str], unit: str) -> Chart:
    numbers = sorted({source for source, _ in found.sources}, reverse=True)
    # By their numbers: two names may be the same once they are short.
    rows, names = [str(source) for source in numbers], [_short(sources[source]) for source in numbers]
    bars = []
    for split, color in zip(found.splits, (PALETTE[0], PALETTE[1], PALETTE[2]), strict=False):
        counts = [found.sources.get((source, split)) for source in numbers]
        texts = [f"{number(each.tokens, 0)} {unit} in {plural(each.documents, 'document')}" if each else "" for each in counts]
        bars.append(
            go.Bar(
                y=rows,
                x=[each.tokens if each else 0 for each in counts],
                orientation="h",
                name=split,
                text=texts,
                textposition="none",
                marker={"color": color},
                hovertemplate="%{text}",
            )
        )
    axes = {"tickformat": "~s", "rangemode": "tozero"}, {"type": "category", "tickvals": rows, "ticktext": names}
    legend = {**LAYOUT["legend"], "traceorder": "normal"}  # type: ignore[dict-item]
    figure = _figure(bars, *axes, barmode="stack", hovermode="y unified", legend=legend)
    return Chart("Sources", f"{unit} kept", figure, height=max(250, 90 + 30 * len(numbers)))


def drops(counts: Mapping[str, int]) -> Chart:
    """Return how much was dropped for which reason, the most at the top."""
    rows = sorted(counts.items(), key=lambda row: row[1])
    bars = go.Bar(
        y=[escape(name, quote=False) for name, _ in rows],
        x=[count for _, count in rows],
        orientation="h",
        marker={"color": PALE},
        hovertemplate="%{x:,}<extra></extra>",
    )
    span = [math.log10(0.7), 1.03 * math.log10(2 * max(counts.values()))]
    axis = {"type": "log", "dtick": 1, "exponentformat": "none", "tickformat": ",d", "range": span}
    figure = _figure([bars], axis, {"type": "category"})
    return Chart("Dropped", "documents, or lines and paragraphs, by reason; a logarithmic scale", figure, height=70 + 22 * len(rows))


def _short(path: str) -> str:
    return escape(path if len(path) <= 40 else f"...{path[-37:]}", quote=False)


def _figure(traces: Sequence[Any], xaxis: Mapping[str, Any], yaxis: Mapping[str, Any], **layout: Any) -> go.Figure:
    axes = {"xaxis": {**AXIS, "showgrid": False, "ticks": "outside", **xaxis}, "yaxis": {**AXIS, **yaxis}}
    usual = {"hovermode": "x unified", "bargap": 0.1, "showlegend": len(traces) > 1}
    return go.Figure(list(traces), {**LAYOUT, **axes, **usual, **layout})
