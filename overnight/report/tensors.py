"""What a run measured of its tensors and of its gradient noise, as the page draws it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from overnight.report.run_reader import Record

# Columns of a heat map; of longer runs every k-th measured step is shown.
COLUMNS = 240


def places(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the `step` and `seconds` of lines of metrics."""
    return {"step": [record["global_step"] for record in records], "seconds": [record.get("seconds", 0) for record in records]}


def heat_maps(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the measured tensors as rows of numbers over the measured steps; None without any.

    Args:
        records: lines of the kind `tensor_norms`, in the order of the steps.

    Returns:
        `step` and `seconds` (columns), and for the trust `ratio` and the `change`, |Δx|/|x|, the `names` of the rows, in the order of the network, and
        their `values`, None where there is none. A tensor without any value has no row.
    """
    records = records[:: max(1, math.ceil(len(records) / COLUMNS))]
    if not records:
        return None
    names = list(dict.fromkeys(name for record in records for name in record["tensor_norms"]))

    def rows(value: Callable[[Sequence[Any]], Any]) -> dict[str, list[Any]]:
        table = {name: [_short(value(record["tensor_norms"].get(name) or (None,) * 4)) for record in records] for name in names}
        shown = {name: values for name, values in table.items() if any(x is not None for x in values)}
        return {"names": list(shown), "values": list(shown.values())}

    return {
        **places(records),
        "ratio": rows(lambda row: row[3]),
        "change": rows(lambda row: row[2] / row[0] if row[0] and row[2] is not None else None),
    }


def noise_curves(records: Sequence[Record], most: int) -> dict[str, Any] | None:
    """Return the noise scale of the run and of its parameter groups over the steps, with the batch; None without any.

    Args:
        records: lines of the kind `noise`, in the order of the steps.
        most: points of a curve.

    Returns:
        `step`, `seconds` and `batch`, the scales of all `groups` (None where unknown), and what the last known one of the run `says`.
    """
    known = [record for record in records if _short(record["groups"].get("run"))]
    records = records[:: max(1, math.ceil(len(records) / most))]
    if not records:
        return None
    names = dict.fromkeys(name for record in records for name in record["groups"])
    return {
        **places(records),
        "batch": [record["batch"] for record in records],
        "groups": {name: [_short(record["groups"].get(name)) for record in records] for name in names},
        "says": _cost(known[-1]) if known else "never known: the gradient did not stand out from its noise",
    }


def _cost(record: Record) -> str:
    """Return what a batch costs compared with the fewest steps and the fewest examples: 1 + B_c/B and 1 + B/B_c times them (arXiv 1812.06162)."""
    scale, batch = record["groups"]["run"], record["batch"]
    return (
        f"at step {record['global_step']:,}: {scale:,.0f}; with {batch:,} sequences a batch, {1 + scale / batch:.1f} times the fewest steps "
        f"and {1 + batch / scale:.1f} times the fewest examples"
    )


def _short(value: Any) -> float | None:
    """Return three significant digits of what is above 0: all that a logarithmic scale shows."""
    return float(f"{value:.3g}") if isinstance(value, int | float) and math.isfinite(value) and value > 0 else None
