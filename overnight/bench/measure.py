"""Time candidates side by side, and report rows that say which is better.

The candidates take turns (A B A B) in one process, so that a slow minute of the machine falls on all of them. Needs the standard library only.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from overnight.run_dir.environment import environment

# Units of which less is better; of every other known unit more is better.
_LESS = frozenset({"s", "ms", "us", "ns", "bytes", "kB", "MB", "GB", "MiB", "GiB", "loss", "error", "steps"})
_MORE = frozenset({"%", "accuracy", "F1", "TFLOP", "x"})


@dataclass(frozen=True)
class Timing:
    """The times of one candidate, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle time (s)."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The times a quarter and three quarters of the way from fastest to slowest (s)."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def measure(
    functions: Mapping[str, Callable[[], object]], warmup: int = 2, repeats: int = 9, sync: Callable[[], object] | None = None
) -> dict[str, Timing]:
    """Time each function, the functions taking turns.

    Args:
        functions: what to time, by name; each call is one unit of work.
        warmup: untimed rounds.
        repeats: timed rounds.
        sync: waits for the device to finish, such as `torch.cuda.synchronize`; called on both sides of the clock.
    """
    assert functions and repeats > 0 and warmup >= 0, "nothing to measure"
    wait = sync or (lambda: None)
    for _ in range(warmup):
        for function in functions.values():
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            wait()
            start = time.perf_counter()
            function()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(times)) for name, times in seconds.items()}


@dataclass(frozen=True)
class Row:
    """One measured number, and the peer's for comparison."""

    name: str
    """What was measured, such as `bert-mini 128 bf16`."""
    value: float
    """The median."""
    unit: str
    """Unit of the value, the spread and the peer's value; it also says whether more or less is better."""
    spread: tuple[float, float] | None = None
    """First and third quartile; None for a number that does not vary."""
    peer: str | None = None
    """With what it is compared."""
    peer_value: float | None = None
    """The peer's median."""
    peer_spread: tuple[float, float] | None = None
    """The peer's first and third quartile."""

    @property
    def ratio(self) -> float | None:
        """How many times better than the peer (above 1: ours is better), None without a peer or where a value is 0."""
        if self.peer_value is None:
            return None
        ours, theirs = (self.peer_value, self.value) if less_is_better(self.unit) else (self.value, self.peer_value)
        return ours / theirs if theirs else None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values; the keys about the peer are absent without one."""
        plain: dict[str, Any] = {"name": self.name, "value": self.value, "unit": self.unit, "spread": self.spread and list(self.spread)}
        if self.peer is not None:
            plain |= {"peer": self.peer, "peer_value": self.peer_value, "ratio": self.ratio}
            plain["peer_spread"] = self.peer_spread and list(self.peer_spread)
        return plain


def less_is_better(unit: str) -> bool:
    """Return whether less of a unit is better (time, memory, loss) or more (rates, shares)."""
    assert unit in _LESS or unit in _MORE or unit.endswith("/s"), (
        f"say in overnight/bench/measure.py whether more or less {unit!r} is better"
    )
    return unit in _LESS


def rate_row(name: str, unit: str, amount: float, ours: Timing, peer: str | None = None, peer_timing: Timing | None = None) -> Row:
    """Return a row of a rate.

    Args:
        unit: such as `sequences/s`.
        amount: units of work in one call, such as the sequences of a batch.
    """
    assert unit.endswith("/s"), f"{unit!r} is not a rate"

    def rate(timing: Timing) -> tuple[float, tuple[float, float]]:
        low, high = timing.quartiles
        return amount / timing.median, (amount / high, amount / low)

    theirs = rate(peer_timing) if peer_timing else (None, None)
    value, spread = rate(ours)
    return Row(name, value, unit, spread, peer, *theirs)


def time_row(name: str, ours: Timing, peer: str | None = None, peer_timing: Timing | None = None) -> Row:
    """Return a row of a time in ms."""

    def scaled(timing: Timing) -> tuple[float, tuple[float, float]]:
        low, high = timing.quartiles
        return timing.median * 1e3, (low * 1e3, high * 1e3)

    theirs = scaled(peer_timing) if peer_timing else (None, None)
    value, spread = scaled(ours)
    return Row(name, value, "ms", spread, peer, *theirs)


def result(what: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a benchmark's outcome with its environment: `what`, `environment`, `rows`."""
    return {"what": what, "environment": environment(), "rows": [row.to_dict() for row in rows]}


def print_result(what: str, rows: Sequence[Row]) -> None:
    """Print the outcome as one JSON object on one line of standard output; call it last."""
    text = json.dumps(_rounded(result(what, rows)), ensure_ascii=False, allow_nan=False)
    sys.stderr.flush()
    print(text, flush=True)


@contextmanager
def printed(what: str) -> Iterator[list[Row]]:
    """Give a list for rows, and print the outcome in the end: of an error or an interruption, of the rows that are there by then."""
    rows: list[Row] = []
    try:
        yield rows
    except BaseException:
        if rows:
            print_result(what, rows)
        raise
    print_result(what, rows)


def _rounded(value: Any) -> Any:
    """Round to five significant digits; more would only claim a precision that a clock does not have."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list | tuple) else value
