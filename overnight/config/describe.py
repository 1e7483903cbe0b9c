"""Every setting of a recipe with its type, default and documentation, for `--help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from overnight.config.fields import Tagged, hints
from overnight.config.reading import member
from overnight.config.schema import RUNS, BertRun, ByteRun
from overnight.display import yaml_text


class Setting(NamedTuple):
    """One key of a recipe."""

    key: str
    """With dots; NAME stands for the name of a phase or a task."""
    type: str
    default: str
    text: str


ANY: dict[str, Any] = {"Encoders": BertRun, "Byte models": ByteRun}
"""The kinds of runs, by what they are runs of."""


def describe(kinds: Mapping[str, Any] | None = None, prefix: str = "", network: str = "", tag: Tagged | None = None) -> Iterator[Setting]:
    """Yield every setting that one of some alternative dataclasses has, with those that have it where not all do.

    Args:
        kinds: the alternatives by name; a run of any kind by default.
        prefix: of the keys.
        network: leave out what other kinds of networks have.
        tag: the key by whose value one of the alternatives is taken.
    """
    kinds = kinds or ANY
    for name in dict.fromkeys(f.name for kind in kinds.values() for f in dataclasses.fields(kind)):
        owners = {label: kind for label, kind in kinds.items() if name in hints(kind)}
        inner: dict[str, Any] = {}
        tags = [note for kind in owners.values() for note in hints(kind)[name][1] if isinstance(note, Tagged)]
        for label, kind in owners.items():
            hint, notes = hints(kind)[name]
            if own := next((note for note in notes if isinstance(note, Tagged)), None):
                inner |= {name: member for name, member in own.members(hint).items() if network in ("", name) or own.key != "kind"}
            elif get_origin(hint) is Mapping or dataclasses.is_dataclass(hint):
                inner[label] = get_args(hint)[1] if get_origin(hint) is Mapping else hint
        if inner:
            named = get_origin(hints(next(iter(owners.values())))[name][0]) is Mapping
            same = dict.fromkeys(inner.values())
            parts = inner if len(same) > 1 else {"": next(iter(same))}
            yield from describe(parts, f"{prefix}{name}.{'NAME.' * named}", network, tags[0] if tags else None)
            continue
        types = dict.fromkeys(_type_name(hints(kind)[name][0]) for kind in owners.values())
        if tag and tag.key == name and len(owners) > 1:
            yield Setting(f"{prefix}{name}", "|".join(types), tag.default, _text_of_all(name, owners.values()))
            continue
        texts = _by_value({label: documentation(kind)[name] for label, kind in owners.items()})
        defaults = _by_value({label: _default(kind, name) for label, kind in owners.items()})
        (first, _), *others = defaults.items()
        default = ", ".join([first, *(f"of {_labels(of)} {value}" for value, of in others)])
        text = " ".join(f"{_labels(of)}: {each}" for each, of in texts.items())
        if len(texts) == 1 and (len(owners) == len(kinds) or _NAMES_ITS_KIND.match(next(iter(texts)))):
            text = next(iter(texts))
        yield Setting(f"{prefix}{name}", "|".join(types), default, text)


def in_training(setting: Setting, of_bytes: bool) -> Setting:
    """Return a setting as a command that trains has it: without the precisions that it refuses, int8 and of byte models fp8."""
    for name in ("int8", *["fp8"] * of_bytes) if setting.key == "precision" else ():
        setting = setting._replace(
            type=setting.type.removesuffix(f"|{name}"), text=f"{setting.text.partition(f'; {name}')[0].rstrip('.')}."
        )
    return setting


# A text that says itself to which kinds it belongs: "`wsd`: share of ...".
_NAMES_ITS_KIND = re.compile(r"(`\w+`(, )?)+: ")


def _by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the labels that have each value, in order."""
    found: dict[str, list[str]] = {}
    for label, value in values.items():
        found.setdefault(value, []).append(label)
    return found


def _labels(labels: Iterable[str]) -> str:
    return ", ".join(label if label in ANY else f"`{label}`" for label in labels)


def _text_of_all(name: str, kinds: Iterable[Any]) -> str:
    """Return the text of a field that several dataclasses have from the first one above all of them."""
    return next(documentation(base)[name] for base in reversed(next(iter(kinds)).__mro__) if name in getattr(base, "__annotations__", ()))


def default_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a recipe has of itself where it names only its phases, tasks and kinds; nothing of what it must say.

    Args:
        tree: a whole recipe.
    """

    def chosen(kind: Any, tree: Any) -> Any:
        values: dict[str, Any] = {}
        for f in dataclasses.fields(kind):
            hint, notes = hints(kind)[f.name]
            given = tree.get(f.name) if isinstance(tree, Mapping) else None
            inner = member(hint, notes, given or {})
            if get_origin(inner) is Mapping:
                values[f.name] = {name: chosen(get_args(inner)[1], each) for name, each in (given or {}).items()}
            elif dataclasses.is_dataclass(inner):
                values[f.name] = chosen(inner, given)
            elif f.default is not dataclasses.MISSING:
                values[f.name] = f.default
            elif f.default_factory is not dataclasses.MISSING:
                values[f.name] = f.default_factory()
        return values

    model = tree.get("model")
    return dict(chosen(RUNS.get(model.get("kind", "bert") if isinstance(model, Mapping) else "bert", BertRun), tree))


def _default(kind: Any, name: str) -> str:
    field = next(f for f in dataclasses.fields(kind) if f.name == name)
    if field.default is not dataclasses.MISSING:
        return yaml_text(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else yaml_text(field.default_factory())


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Union:
        return "|".join(_type_name(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return "|".join(filter(None, get_args(hint)))
    if get_origin(hint) in (list, tuple):
        inner = ", ".join(_type_name(get_args(arg)[0] if hasattr(arg, "__metadata__") else arg) for arg in get_args(hint))
        return f"{get_origin(hint).__name__}[{inner}]"
    return getattr(hint, "__name__", str(hint))


@cache
def documentation(kind: type) -> dict[str, str]:
    """Return the text below each field of a dataclass."""
    found: dict[str, str] = {}
    for base in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found
