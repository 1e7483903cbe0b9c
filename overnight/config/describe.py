"""Every setting of a recipe with its type, default and documentation, for `--help`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args, get_origin

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


ANY: dict[str, Any] = {"BERT": BertRun, "byte models": ByteRun}
"""The kinds of runs, by what they are runs of."""


def describe(kinds: Mapping[str, Any] | None = None, prefix: str = "", network: str = "") -> Iterator[Setting]:
    """Yield every setting that one of some alternative dataclasses has, with those that have it where not all do.

    Args:
        kinds: the alternatives by name; a run of any kind by default.
        prefix: of the keys.
        network: leave out what other kinds of networks have.
    """
    kinds = kinds or ANY
    for name in dict.fromkeys(f.name for kind in kinds.values() for f in dataclasses.fields(kind)):
        owners = {label: kind for label, kind in kinds.items() if name in hints(kind)}
        inner: dict[str, Any] = {}
        for label, kind in owners.items():
            hint, notes = hints(kind)[name]
            tag = next((note for note in notes if isinstance(note, Tagged)), None)
            if tag:
                inner |= {name: member for name, member in tag.members(hint).items() if network in ("", name) or tag.key != "kind"}
            elif get_origin(hint) is Mapping or dataclasses.is_dataclass(hint):
                inner[label] = get_args(hint)[1] if get_origin(hint) is Mapping else hint
        if inner:
            named = get_origin(hints(next(iter(owners.values())))[name][0]) is Mapping
            same = dict.fromkeys(inner.values())
            yield from describe(inner if len(same) > 1 else {"": next(iter(same))}, f"{prefix}{name}.{'NAME.' * named}", network)
            continue
        types = dict.fromkeys(_type_name(hints(kind)[name][0]) for kind in owners.values())
        defaults = dict.fromkeys(_default(kind, name) for kind in owners.values())
        of = f"`{'`, `'.join(owners)}`: " if len(owners) < len(kinds) else ""
        texts = dict.fromkeys(documentation(kind)[name] for kind in owners.values())
        yield Setting(f"{prefix}{name}", "|".join(types), " or ".join(defaults), of + " ".join(texts))


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
