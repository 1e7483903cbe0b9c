"""Numbers as people read them, in one form wherever they are shown: 14.6 %, 1,800, 3 min 05 s. Files keep the plain values."""

from __future__ import annotations

from collections.abc import Mapping

_SHARES = ("accuracy", "f1", "exact_match")
# Shown times 100, as GLUE does, but no per cent.
_CORRELATIONS = ("mcc", "pearson", "spearman")


def share(value: float | None, scale: int = 100, unit: str = " %") -> str:
    """Return a share as per cent with one decimal; a dash where it was not measured."""
    return "-" if value is None else f"{value * scale:.1f}{unit}"


def points(value: float | None, scale: int = 100) -> str:
    """Return a difference of shares in points of per cent; a dash for a single seed."""
    return share(value, scale, "")


def number(value: float | None, decimals: int) -> str:
    """Return a number with thousands separated; a dash where it was not measured."""
    return "-" if value is None else f"{value:,.{decimals}f}"


def duration(seconds: float) -> str:
    """Return a time as people say it: 48 s, 7 min 12 s, 3 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def unit(metric: str | None) -> str:
    """Return what follows the value of a metric: per cent for a share, nothing for a correlation."""
    return " %" if metric and (metric in _SHARES or "accuracy" in metric) else ""


def scale_of(task: object) -> int:
    """Return by what the metrics of a task are multiplied to be shown: those of SQuAD are per cent already, as its own script has them."""
    return 1 if str(task).startswith("squad") else 100


def measure(name: str, value: float, scale: int = 100) -> str:
    """Return the value of a metric: a share as per cent, a correlation times 100, a loss or bits with three decimals.

    Args:
        name: of the metric.
        value: as it stands in the files.
        scale: see :func:`scale_of`.
    """
    return share(value, scale, unit(name)) if unit(name) or name in _CORRELATIONS else number(value, 3)


def measures(values: Mapping[str, float], scale: int = 100) -> str:
    """Return metrics in one line: `mlm loss 5.676  mlm accuracy 14.4 %`."""
    return "  ".join(f"{name.replace('_', ' ')} {measure(name, value, scale)}" for name, value in values.items())
