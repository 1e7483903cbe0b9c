"""What an annotation of a setting says besides its type: the values it may have, its kind, and whether it belongs to a run's identity."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from overnight.state_files import is_text

MACHINE = "how this machine carries the run out"
"""Marks a setting that is no part of a run's identity: a run may be resumed with another value."""


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may be: from `low` to `high`, each without itself where it is open."""

    low: float = 0
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a number is inside; NaN and Inf never are."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low} and finite" if self.open_low else f"{self.low} or more, and finite"
        if self.open_high:
            return f"{self.low} or more and below {self.high}"
        return f"above {self.low}, {self.high} at most" if self.open_low else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class Tagged:
    """Which member of a union of dataclasses a mapping is, by the value of one of its keys."""

    key: str
    default: str
    """The value where the mapping does not name one."""

    def member(self, union: Any, tree: Any) -> Any:
        """Return the class that a mapping is of, or None where its tag names none."""
        tag = tree.get(self.key, self.default) if isinstance(tree, Mapping) else self.default
        return self.members(union).get(tag) if isinstance(tag, str) else None

    def members(self, union: Any) -> dict[str, Any]:
        """Return the classes of the union by tag."""
        return {tag: kind for kind in get_args(union) for tag in get_args(hints(kind)[self.key][0])}


Positive, NonNegative = Range(open_low=True), Range()
PositiveInt = Annotated[int, Positive]
PositiveFloat = Annotated[float, Positive]
NonNegativeInt = Annotated[int, NonNegative]
NonNegativeFloat = Annotated[float, NonNegative]
Fraction = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, 1, open_high=True)]
LayerDecay = Annotated[float, Range(0, 1, open_low=True)]


def hints(kind: Any) -> Mapping[str, tuple[Any, tuple[Any, ...]]]:
    """Return the type of every field of a dataclass, with what its annotation adds."""
    return _hints(kind)


# A function of its own, since a type checker takes a class for no key of a cache.
@functools.cache
def _hints(kind: Any) -> Mapping[str, tuple[Any, tuple[Any, ...]]]:
    found = {}
    known = get_type_hints(kind, include_extras=True)
    for f in dataclasses.fields(kind):
        hint, notes = known[f.name], ()
        while get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            notes = (*notes, *more)
        found[f.name] = (hint, notes)
    return found


def out_of_range(part: Any, prefix: str = "") -> Iterator[str]:
    """Yield a line for every number or word in nested settings that its annotation does not allow, and every text that no file could hold: key, value, what is allowed."""
    for name, (hint, notes) in hints(type(part)).items():
        value, key = getattr(part, name), f"{prefix}{name}"
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and not is_text(text):
                yield f"{key} = {text!r}: {_why_no_text(text)}"
        if dataclasses.is_dataclass(value):
            yield from out_of_range(value, f"{key}.")
        elif isinstance(value, dict):
            for each, inner in value.items():
                if dataclasses.is_dataclass(inner):
                    yield from out_of_range(inner, f"{key}.{each}.")
        elif get_origin(hint) in (list, tuple):
            allowed = next((note for arg in get_args(hint) for note in getattr(arg, "__metadata__", ()) if isinstance(note, Range)), None)
            if allowed and not all(allowed.holds(x) for x in value):
                yield f"{key} = {list(value)}: each must be {allowed}"
        elif get_origin(hint) is Literal:
            if value not in get_args(hint):
                yield f"{key} = {value!r}: must be one of {', '.join(map(str, get_args(hint)))}"
        else:
            for allowed in (note for note in notes if isinstance(note, Range)):
                if not allowed.holds(value):
                    yield f"{key} = {value}: must be {allowed}"


def _why_no_text(text: str) -> str:
    """Return why a text from the command line could not be read, and what to do."""
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return "holds bytes that are not UTF-8; rename the file or folder"
    return "is UTF-8, which the locale is not; set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
