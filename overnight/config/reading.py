"""A mapping, as read from YAML, to the dataclass that it describes; what is wrong is said by key, value and what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from overnight.config.fields import Tagged, hints
from overnight.config.optimizers import OPTIMIZERS
from overnight.config.schema import MODELS, BertPhase, BertRun, BytePhase, ByteRun
from overnight.state_files import adapter

# Classes of which a mapping can be only one: a key of another one is distinguished from a misspelled key.
_ALTERNATIVES: tuple[dict[str, Any], ...] = (
    OPTIMIZERS,
    MODELS,
    {"BERT": BertPhase, "a byte model": BytePhase},
    {"BERT": BertRun, "a byte model": ByteRun},
)

_POWER_OF_TEN = re.compile(r"[-+]?\d+[eE]\+?\d+")


def read_section(kind: Any, tree: Any, key: str, problems: list[str]) -> Any:
    """Return the dataclass that a mapping describes, or None where something in it is wrong.

    Args:
        kind: the dataclass.
        tree: the mapping.
        key: where it stands, with dots; empty for the whole recipe.
        problems: a line is added for each mistake.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if not isinstance(tree, Mapping):
        problems.append(f"{key} = {tree!r}: is a section, not a value; set one of its keys: {', '.join(fields)}")
        return None
    before, prefix, values = len(problems), f"{key}." if key else "", {}
    for name, (hint, notes) in hints(kind).items():
        if name in tree and tree[name] is None and fields[name].default == "":  # `null` is no text, as the empty one is
            values[name] = ""
        elif name in tree:
            values[name] = read(hint, notes, tree[name], f"{prefix}{name}", problems)
        elif fields[name].default is dataclasses.MISSING and fields[name].default_factory is dataclasses.MISSING:
            problems.append(f"{prefix}{name}: is missing and has no default")
    problems += [f"{prefix}{name} = {tree[name]!r}: {unknown(kind, str(name))}" for name in tree if name not in fields]
    return kind(**values) if len(problems) == before else None


def read(hint: Any, notes: tuple[Any, ...], value: Any, key: str, problems: list[str]) -> Any:
    """Return a value as its type wants it, or None where it cannot be that."""
    kind = member(hint, notes, value)
    if kind is None:
        tag = next(note for note in notes if isinstance(note, Tagged))
        problems.append(f"{key}.{tag.key} = {value.get(tag.key)!r}: must be one of {', '.join(tag.members(hint))}")
    elif dataclasses.is_dataclass(kind):
        return read_section(kind, value, key, problems)
    elif get_origin(kind) is Mapping:
        value = {} if value is None else value  # a section without keys, or `null`
        if isinstance(value, Mapping):
            if unnamed := [name for name in value if not isinstance(name, str)]:
                problems += [f"{key}.{name}: YAML does not read {name!r} as a name; put it in quotes" for name in unnamed]
                return None
            return {name: read_section(get_args(kind)[1], each, f"{key}.{name}", problems) for name, each in value.items()}
        problems.append(f"{key} = {value!r}: must be a mapping of names to sections")
    elif wrong := list(_boolean_problems(kind, value, key)):
        problems += wrong
    else:
        return _leaf(kind, value, key, problems)
    return None


def _boolean_problems(kind: Any, value: Any, key: str) -> Iterator[str]:
    """Yield numbers given as true or false and the reverse, which pydantic would take for 1 and 0."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (list, tuple) and isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _boolean_problems(get_args(kind)[0], each, f"{key}.{number}")
    elif get_origin(kind) is Union and bool in get_args(kind):
        words = [word for option in get_args(kind) for word in get_args(option)]
        if not isinstance(value, bool) and value not in words:
            yield f"{key} = {value!r}: must be true, false or {', '.join(words)}"
    elif kind in (int, float, bool) and isinstance(value, bool) != (kind is bool):
        yield f"{key} = {value!r}: must be {({int: 'a whole number', float: 'a number', bool: 'true or false'})[kind]}"


def _leaf(kind: Any, value: Any, key: str, problems: list[str]) -> Any:
    from pydantic import ValidationError

    if kind is int and isinstance(value, str) and _POWER_OF_TEN.fullmatch(value):  # which YAML takes for text without a point
        value = float(value)
    try:
        return adapter(kind).validate_python(value)
    except ValidationError as error:
        if value is None:
            problems.append(f"{key} = null: cannot be empty; leave it out{', or put the word in quotes' if kind is str else ''}")
            return None
        for each in error.errors():
            place = ".".join([key, *map(str, each["loc"])])
            what = f" = {each['input']!r}: {each['msg'][0].lower()}{each['msg'][1:]}"
            problems.append(f"{place}: is missing" if each["type"] == "missing" else f"{place}{what}{_remedy(place, value)}")
    return None


def _remedy(key: str, value: Any) -> str:
    """Return how one GPU of many is chosen, where a value of `compute.device` names one, or which precision trains nothing; else nothing."""
    if key == "precision":
        return "; int8 works only for predict, embed and serve"
    name, colon, number = str(value).partition(":")
    chosen = key == "compute.device" and name == "cuda" and colon
    return f"; take 'cuda', and choose one with CUDA_VISIBLE_DEVICES={number} in the environment" if chosen else ""


def member(hint: Any, notes: tuple[Any, ...], value: Any) -> Any:
    """Return the type itself, or of a union the class that a mapping's tag names; None where it names none."""
    tag = next((note for note in notes if isinstance(note, Tagged)), None)
    return tag.member(hint, value) if tag else hint


def unknown(kind: Any, name: str) -> str:
    """Return what to say of a key that a dataclass does not have."""
    allowed = [f.name for f in dataclasses.fields(kind)]
    for kinds in _ALTERNATIVES:
        if kind in kinds.values() and (
            owners := [of for of, other in kinds.items() if name in {f.name for f in dataclasses.fields(other)}]
        ):
            here = next(of for of, other in kinds.items() if other is kind)
            return f"{here} has no {name}; it belongs to {', '.join(owners)}"
    near = _below(kind, name) or difflib.get_close_matches(name, allowed, 1, 0.5)
    return f"unknown key{f', did you mean {near[0]!r}?' if near else ';'} Allowed: {', '.join(allowed)}"


def _below(kind: Any, name: str) -> list[str]:
    """Return where a recipe has a key that was given without its section, such as `optim`, `lr` or `vocab_size`; of a section itself nothing."""
    if kind not in (BertRun, ByteRun):
        return []
    if any(name in hints(each) for each in OPTIMIZERS.values()):  # before tasks, which have a rate too
        return [f"phases.NAME.optim.{name}"]
    for section, (hint, _) in hints(kind).items():
        named = get_origin(hint) is Mapping
        inner = get_args(hint)[1] if named else hint
        if any(dataclasses.is_dataclass(each) and name in hints(each) for each in get_args(inner) or (inner,)):
            return [f"{section}.NAME.{name}" if named else f"{section}.{name}"]
    return []
