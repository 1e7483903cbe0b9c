"""The charts of the page as plotly figures, which the browser only has to draw.

The x of a trace are steps, and its `meta` is the training time at the same points; `layout.meta` is what the layout has by time. The script of the page swaps them.
Colors are read on a light page and on a dark one; those of text and hover labels are the page's (page.css).
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import plotly.graph_objects as go

from overnight.display import plural
from overnight.report.run_reader import Record, RunFolder
from overnight.report.summary import of_bytes
from overnight.report.tensors import heat_maps, noise_curves, places

# Points of a curve; of longer runs every k-th line is shown.
POINTS = 3000
# Events that every run has; the others are worth a look.
ROUTINE = ("checkpoint_saved", "memory", "micro_batch_size")
PALETTE = ("#4a7fc8", "#d9772b", "#2a9d83", "#a166bd", "#b9921a", "#cf5374", "#5d9cc4", "#85964a")
PALE, _ALARM = "#8b99ab", "#c8612f"
# Where a phase begins: in a chart, and in a heat map, where it also parts the layers.
_MARK, _GAP = {"color": "rgba(128,128,128,0.8)", "width": 1, "dash": "dot"}, {"color": "rgba(255,255,255,0.7)", "width": 1}
_LINE = "rgba(128,128,128,0.4)"
AXIS = {"gridcolor": "rgba(128,128,128,0.16)", "linecolor": _LINE, "zeroline": False, "automargin": True}
_FONT = {"family": "system-ui, -apple-system, Segoe UI, Helvetica Neue, Arial, sans-serif", "size": 12}
LAYOUT = {
    "template": "none",
    "margin": {"l": 52, "r": 14, "t": 20, "b": 30},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": _FONT,
    "hoverlabel": {"namelength": -1, "bordercolor": _LINE, "font": _FONT},
    "legend": {"orientation": "h", "x": 0, "y": -0.16, "yanchor": "top", "font": {"size": 11}},
}


@dataclass(frozen=True)
class Chart:
    """A figure with its caption."""

    title: str
    unit: str
    figure: go.Figure
    notes: Sequence[str] = ()
    height: int = 250
    """Pixels."""

    def json(self) -> str:
        """Return the figure as JSON that can stand inside a script element: `</script>` in a name would end it."""
        return str(self.figure.to_json()).replace("<", "\\u003c")


@dataclass(frozen=True)
class _Curve:
    """What a chart shows of the training and of the validation lines of metrics."""

    title: str
    unit: str
    hover: str
    train: str = ""
    validation: str = ""
    scale: float = 1
    axis: Record = field(default_factory=dict)
    """What the vertical axis has beyond the usual."""
    above: float = -math.inf
    """Only what is ever above it is worth a chart."""


_FROM_0 = {"rangemode": "tozero"}
_CURVES = (
    _Curve("Masked-LM loss", "nats", "%{y:.3f} nats", train="mlm_loss", validation="mlm_loss"),
    _Curve("Masked-LM accuracy", "%, validation", "%{y:.1f} %", validation="mlm_accuracy", scale=100),
    _Curve("Next-token loss", "nats", "%{y:.3f} nats", train="clm_loss", validation="clm_loss"),
    _Curve("Next-token accuracy", "%, validation", "%{y:.1f} %", validation="clm_accuracy", scale=100),
    _Curve("NSP loss", "nats", "%{y:.3f} nats", train="nsp_loss", validation="nsp_loss"),
    _Curve("NSP accuracy", "%, validation", "%{y:.1f} %", validation="nsp_accuracy", scale=100),
    _Curve("Token matching loss", "nats", "%{y:.3f} nats", train="match_loss"),
    _Curve("Bits per byte", "", "%{y:.3f} bits", train="byte_loss", validation="byte_loss", scale=1 / math.log(2)),
    _Curve("Byte accuracy", "%, validation", "%{y:.1f} %", validation="byte_accuracy", scale=100),
    _Curve("Label loss", "squared error", "%{y:.4f}", train="label_loss", validation="label_loss"),
    _Curve("Learning rate", "", "%{y:.3g}", train="lr", axis={**_FROM_0, "exponentformat": "e"}),
    _Curve("Gradient norm", "before clipping", "%{y:.3g}", train="grad_norm", axis=_FROM_0),
    _Curve("Throughput", "tokens/s", "%{y:,.0f} tokens/s", train="tokens_per_s", axis=_FROM_0),
    _Curve("Throughput", "sequences/s", "%{y:,.1f} sequences/s", train="sequences_per_s", axis=_FROM_0),
    _Curve("Model FLOP utilization", "% of the peak", "%{y:.1f} %", train="mfu", scale=100, axis=_FROM_0),
    _Curve("Memory", "GB", "%{y:.2f} GB", train="memory_gb", axis=_FROM_0),
    _Curve("Loss scale", "fp16", "%{y:,.0f}", train="loss_scale", axis={"type": "log", "dtick": math.log10(2)}),
    _Curve("Skipped steps", "so far", "%{y:,.0f} steps", train="skipped", axis=_FROM_0, above=0),
    _Curve("Waiting for data", "% of the time", "%{y:.1f} %", train="data_wait_fraction", scale=100, axis=_FROM_0, above=0.005),
)
_MAPS = {"ratio": ("Trust ratio", "of the tensors that are adapted"), "change": ("Update over weight", "|Δx| / |x| of one step")}


class _Run:
    """A run with its color and what its charts show."""

    def __init__(self, name: str, color: str, folder: RunFolder) -> None:
        self.name, self.color, records = name, color, folder.records
        self.lines = {kind: records[kind][:: max(1, math.ceil(len(records[kind]) / POINTS))] for kind in ("train", "eval")}
        # A run of BERT without NSP has one loss only.
        self.one_loss = not of_bytes(folder) and not any("mlm_loss" in line for line in records["train"])
        self.phases, self.events = _phase_starts(folder), _events(folder)
        self.tensors: Any = heat_maps(records["tensor_norms"])
        self.noise: Any = noise_curves(records["noise"], POINTS)

    def values(self, kind: str, key: str) -> list[float | None]:
        """Return a number of each line, None where it has none; nothing at all where no line has one."""
        found = [_finite(line.get("loss" if self.one_loss and (kind, key) == ("train", "mlm_loss") else key)) for line in self.lines[kind]]
        return found if any(value is not None for value in found) else []


class Charts:
    """The charts of runs, which are laid over each other on shared horizontal axes."""

    def __init__(self, folders: Sequence[RunFolder], names: Sequence[str]) -> None:
        colors = itertools.cycle(PALETTE)
        self.runs = [_Run(name, color, folder) for folder, name, color in zip(folders, names, colors, strict=False)]
        self.several = len(self.runs) > 1
        longest = max((line["seconds"] for run in self.runs for lines in run.lines.values() for line in lines), default=0)
        self.unit, self.divisor = ("s", 1) if longest < 180 else ("min", 60) if longest < 7200 else ("h", 3600)

    def curves(self) -> list[Chart]:
        """Return the charts over the steps for which there are values."""
        charts = [Chart(curve.title, curve.unit, figure) for curve in _CURVES if (figure := self._curve(curve))]
        return [*charts, *self._noise(), *self._events()]

    def maps(self) -> Iterator[Chart]:
        """Yield the heat maps of the measured tensors, on one color scale for all runs."""
        for key, (title, unit) in _MAPS.items():
            measured = [run for run in self.runs if run.tensors and run.tensors[key]["names"]]
            logs = sorted(math.log10(v) for run in measured for row in run.tensors[key]["values"] for v in row if v)
            for run in measured:
                # A hundredth at each end is left to the last color: few first steps would else flatten all others.
                low, high = (logs[round(q * (len(logs) - 1))] for q in (0.01, 0.99))
                yield self._map(run, key, f"{title}, {run.name}" if self.several else title, unit, (low, max(high, low + 0.05)))

    def _curve(self, curve: _Curve) -> go.Figure | None:
        traces = []
        for run in self.runs:
            for kind, key, what in (("train", curve.train, "training"), ("eval", curve.validation, "validation")):
                values = run.values(kind, key)
                if not any(value is not None and value > curve.above for value in values):
                    continue
                faint = kind == "train" and bool(curve.validation)
                style: Record = {"mode": "lines" if kind == "train" or len(values) > 60 else "lines+markers", "marker": {"size": 6}}
                style["line"] = {"color": PALE if faint and not self.several else run.color, "width": 1.3 if faint else 2}
                scaled = [value if value is None else curve.scale * value for value in values]
                traces.append(
                    self._scatter(
                        run, what, places(run.lines[kind]), scaled, curve.hover, opacity=0.5 if faint and self.several else 1, **style
                    )
                )
        return self._figure(traces, {"nticks": 6, "exponentformat": "SI", **curve.axis}) if traces else None

    def _scatter(self, run: _Run, what: str, places: Record, values: Sequence[Any], hover: str, **style: Any) -> go.Scatter:
        name = escape(f"{run.name}, {what}" if self.several else what, quote=False)
        template = f"{hover}<extra>{name}</extra>"
        if self.several or "text" in style:  # no label unites the curves of a chart, under a heading with the place
            template = f"{f'{name}<br>' if self.several else ''}%{{x}}: {hover}<extra></extra>"
        group = run.name if self.several else None
        return go.Scatter(**self._x(places), y=values, name=name, legendgroup=group, hovertemplate=template, **style)

    def _noise(self) -> Iterator[Chart]:
        runs = [run for run in self.runs if run.noise]
        traces, notes = [], []
        for run in runs:
            noise, whole = run.noise, "noise scale" if self.several else "all tensors"
            curves = [(whole, noise["groups"].get("run", []), {"color": run.color, "width": 2.2})]
            # The batch is a staircase; the groups of the optimizer are shown where there is one run.
            curves.append(
                ("batch", noise["batch"], {"color": run.color if self.several else PALE, "width": 1.4, "dash": "dot", "shape": "hv"})
            )
            groups = {} if self.several else {name: values for name, values in noise["groups"].items() if name != "run"}
            curves += [(name, values, {"color": c, "width": 1}) for c, (name, values) in zip(PALETTE[1:], groups.items(), strict=False)]
            traces += [self._scatter(run, name, noise, y, "%{y:,.0f} sequences", mode="lines", line=line) for name, y, line in curves]
            notes.append(f"{run.name}, {noise['says']}" if self.several else noise["says"])
        if runs:
            figure = self._figure(traces, {"type": "log", "exponentformat": "none", "nticks": 6}, showlegend=not self.several)
            yield Chart("Gradient noise scale", "sequences; dotted: the batch; a gap: unknown", figure, notes)

    def _events(self) -> Iterator[Chart]:
        kinds = sorted({event["event"] for run in self.runs for event in run.events}, key=lambda kind: (_rank(kind), kind), reverse=True)
        traces = []
        for run in self.runs:
            texts = [text if len(text) <= 160 else f"{text[:160]} ..." for text in (event["message"] for event in run.events)]
            style = {"size": 9, "symbol": "line-ns-open", "line": {"width": 2}, "color": [self._color(run, event) for event in run.events]}
            where = [_title(event["event"]) for event in run.events]
            shown = {"mode": "markers", "marker": style, "text": [escape(text, quote=False) for text in texts]}
            traces.append(self._scatter(run, "event", places(run.events), where, "%{text}", **shown))
        if kinds:
            axis = {"type": "category", "categoryarray": [_title(kind) for kind in kinds]}
            figure = self._figure(traces, axis, events=False, hovermode="closest")
            yield Chart("Events", "also the short marks in the other charts", figure)

    def _map(self, run: _Run, key: str, title: str, unit: str, span: tuple[float, float]) -> Chart:
        """Return a row for each tensor and a column for each measured step, the color on a logarithmic scale."""
        names, values = [escape(name, quote=False) for name in run.tensors[key]["names"]], run.tensors[key]["values"]
        height = max(3, min(15, 960 // len(names)))
        starts = [row for row, name in enumerate(names) if row == 0 or _block(name) != _block(names[row - 1])]
        # Every row has its name where there is room, else every layer, the names that would lie on the one above left out.
        middles = [((start + end - 1) / 2, _block(names[start])) for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]
        labels: list[tuple[float, str]] = []
        for row, name in enumerate(names) if height >= 11 else middles:
            if not labels or (row - labels[-1][0]) * height >= 11:
                labels.append((row, name))
        ticks = [span[0] + part * (span[1] - span[0]) for part in (0, 0.25, 0.5, 0.75, 1)]
        trace = go.Heatmap(
            **self._x(run.tensors),
            y=names,
            z=[[value and round(math.log10(value), 3) for value in row] for row in values],
            customdata=values,
            zmin=span[0],
            zmax=span[1],
            colorscale="Viridis",
            hovertemplate="%{y}<br>%{x}: %{customdata:.3g}<extra></extra>",
            hoverongaps=False,
            colorbar={"thickness": 12, "outlinewidth": 0, "tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks], "len": 1},
        )
        # A label is a hair beside its row: where it is right on it, the hover label takes it for the name of the row.
        axis = {"type": "category", "autorange": "reversed", "showgrid": False, "ticks": "", "tickfont": {"size": 11}}
        axis |= {"tickvals": [row + 0.1 for row, _ in labels], "ticktext": [name for _, name in labels]}
        between = [_rule((0, 1), (start - 0.5,) * 2, _GAP, xref="paper", yref="y") for start in starts[1:]]
        figure = self._figure([trace], axis, [run], mark=_GAP, shapes=between, hovermode="closest")
        return Chart(title, unit, figure, height=len(names) * height + 50)

    def _figure(
        self,
        traces: Sequence[Any],
        yaxis: Record,
        runs: Sequence[_Run] = (),
        events: bool = True,
        mark: Record = _MARK,
        shapes: Sequence[Record] = (),
        **layout: Any,
    ) -> go.Figure:
        """Return traces over steps; what is other by time is in `layout.meta`."""
        by_step, by_time = (
            {"xaxis": self._axis(time), **self._marks(runs or self.runs, time, events, mark, shapes)} for time in (False, True)
        )
        usual = {**LAYOUT, "yaxis": {**AXIS, **yaxis}, "showlegend": False, "hovermode": "closest" if self.several else "x unified"}
        return go.Figure(traces, {**usual, **by_step, "meta": by_time, **layout})

    def _axis(self, time: bool) -> Record:
        """Return the horizontal axis; its prefix or suffix stands at one tick, and in every hover label."""
        step = {"tickprefix": "step ", "showtickprefix": "first", "hoverformat": ",d"}
        unit = {"ticksuffix": f" {self.unit}", "showticksuffix": "last", "hoverformat": ".1f"}
        return {**AXIS, "showgrid": False, "ticks": "outside", "tickcolor": _LINE, "rangemode": "tozero", **(unit if time else step)}

    def _marks(self, runs: Sequence[_Run], time: bool, events: bool, mark: Record, shapes: Sequence[Record]) -> dict[str, list[Record]]:
        """Return a line where a phase begins, with its name where there is one run, and short marks where something happened."""
        found, names = list(shapes), []
        for run in runs:
            starts, odd = places(run.phases), [event for event in run.events if event["event"] not in ROUTINE and events]
            at = self._x(starts)["meta" if time else "x"]
            found += [_rule((x, x), (0, 1), mark) for x in at[1:]]
            if len(runs) == 1:
                place = {"y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "showarrow": False, "font": {"size": 11}}
                names = [{**place, "x": x, "text": escape(start["phase"], quote=False)} for x, start in zip(at, run.phases, strict=True)]
            for x, event in zip(self._x(places(odd))["meta" if time else "x"], odd, strict=True):
                found.append(_rule((x, x), (0, 0.05), {"color": self._color(run, event), "width": 1.5}))
        return {"shapes": found, "annotations": names}

    def _color(self, run: _Run, event: Record) -> str:
        return run.color if self.several else (_ALARM, PALETTE[0], PALE)[_rank(event["event"])]

    def _x(self, places: Record) -> dict[str, list[float]]:
        return {"x": places["step"], "meta": [round(seconds / self.divisor, 4) for seconds in places["seconds"]]}


def histogram(found: Record, title: str) -> Chart:
    """Return how often a unit has which value in each class."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(found["edges"])]
    bars = [
        go.Bar(x=middles, y=counts, name=escape(label, quote=False), marker={"color": color}, opacity=0.55)
        for color, (label, counts) in zip((PALETTE[1], PALETTE[0]), found["counts"].items(), strict=False)
    ]
    axes = {"xaxis": {**AXIS, "hoverformat": ".3g", "showgrid": False}, "yaxis": AXIS}
    return Chart(title, "", go.Figure(bars, {**LAYOUT, **axes, "barmode": "overlay", "bargap": 0.05, "hovermode": "x unified"}), height=220)


def event_text(event: Record) -> str:
    """Return what happened, in words."""
    if event["event"] == "memory" and isinstance(event.get("peak_gb"), int | float):
        size = f"{plural(event['micro_batch_size'], 'sequence')} at once" if isinstance(event.get("micro_batch_size"), int) else ""
        return f"phase {event.get('phase', '?')} used at most {event['peak_gb']:.2f} GB{f', with {size}' if size else ''}"
    message = str(event.get("message", ""))
    name = event["event"].replace("_", " ")
    return f"{name}: {message}" if message else name


def _events(folder: RunFolder) -> list[Record]:
    """Return what happened at which step and time (that of the last line of metrics before it, where it has none of its own)."""
    lines = [*folder.records["train"], *folder.records["eval"]]
    times = sorted((line["global_step"], line["seconds"]) for line in lines)

    def seconds(event: Record) -> float:
        before = bisect.bisect_right(times, (event["global_step"], math.inf))
        return float(event.get("seconds", times[before - 1][1] if before else 0.0))

    events = [event for event in folder.records["event"] if isinstance(event.get("global_step"), int)]
    return [{**event, "seconds": seconds(event), "message": event_text(event)} for event in events]


def _phase_starts(folder: RunFolder) -> list[Record]:
    """Return the first line of each phase (a resumed run begins a phase again)."""
    starts: dict[str, Record] = {}
    begun = [record for record in folder.records["phase"] if record["event"] == "start"]
    for record in [*begun, *folder.records["train"], *folder.records["eval"]]:
        starts.setdefault(record["phase"], record)
    return list(starts.values())


def _rank(event: str) -> int:
    """Checkpoints and what was measured of the memory are routine, a resume is common; the rest is worth a look."""
    return 2 if event in ROUTINE else int(event in ("resumed", "budget"))


def _title(event: str) -> str:
    return escape(event.replace("_", " "), quote=False)


def _rule(x: tuple[float, float], y: tuple[float, float], line: Mapping[str, Any], xref: str = "x", yref: str = "paper") -> Record:
    return {"type": "line", "x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1], "xref": xref, "yref": yref, "line": line}


def _block(name: str) -> str:
    """Return the layer of a tensor: up to its number, else the first part of its name."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else name.split(".")[0]


def _finite(value: Any) -> float | None:
    """Return a number that can be drawn; NaN and infinity leave a gap in the curve."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None
