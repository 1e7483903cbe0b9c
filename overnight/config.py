"""A run is one frozen value: load a recipe, override it, check it, save it.

The value's dataclasses are those of :mod:`overnight.schema`; pydantic reads and types the recipe (:func:`load`),
:func:`check` refuses values that cannot work together. Both name the key, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from overnight.errors import ConfigError
from overnight.schema import Data, Finetune, Model, Optim, Phase, Run, Schedule, Train

__all__ = [
    "Data",
    "Finetune",
    "Model",
    "Optim",
    "Phase",
    "Run",
    "Schedule",
    "Train",
    "build",
    "check",
    "describe",
    "differences",
    "environment_path",
    "identity",
    "load",
    "recipes",
    "save",
    "to_tree",
]


def recipes() -> dict[str, Path]:
    """The shipped recipes by name."""
    folder = Path(str(resources.files("overnight") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load(recipe: str, overrides: Sequence[str] = ()) -> Run:
    """The run that a recipe and dotted overrides describe.

    Args:
        recipe: a shipped recipe's name or a YAML file.
        overrides: `phases.long.optim.lr=4e-3` and the like; values are YAML.

    Raises:
        ConfigError: naming every wrong key, its value and what is allowed.
    """
    import yaml

    path = recipes().get(recipe, Path(recipe))
    if not path.is_file():
        near = difflib.get_close_matches(recipe, recipes(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no recipe {recipe!r}: it is neither a file nor one of {', '.join(recipes())}{hint}")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, as the shipped recipes do")
    for override in overrides:
        _override(tree, override)
    return build(tree)


def build(tree: Mapping[str, Any]) -> Run:
    """A checked run from a plain mapping, as read from YAML."""
    from pydantic import TypeAdapter, ValidationError

    problems = dict(_boolean_problems(tree))
    try:
        run = TypeAdapter(Run).validate_python(tree)
    except ValidationError as error:
        problems = {loc: _explain(loc, e) for e in error.errors() for loc in [tuple(e["loc"])]} | problems
    if problems:
        raise ConfigError("\n".join(problems.values()))
    impossible = list(check(run))
    if impossible:
        raise ConfigError("\n".join(impossible))
    return run


def save(run: Run) -> str:
    """The run as YAML that :func:`load` reads back to an equal value."""
    import yaml

    return yaml.safe_dump(to_tree(run), sort_keys=False, width=120)


def to_tree(run: Run) -> dict[str, Any]:
    """The run as nested plain values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return dict(plain(dataclasses.asdict(run)))


def differences(a: Any, b: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys in which two trees differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from differences(a.get(key, "(absent)"), b.get(key, "(absent)"), f"{prefix}.{key}" if prefix else str(key))
    elif a != b:
        yield f"{prefix}: {a} there, {b} here"


# What only says how this machine carries the run out, and the tasks, whose results say themselves with what they were made.
NOT_IDENTITY = ("train", "out", "data.dir", "data.workers", "phases.*.micro_batch", "finetune")


def identity(run: Run) -> dict[str, Any]:
    """The part of a run that decides what pretraining learns; a run folder belongs to one identity.

    Precision is part of it: it changes the curve beyond rounding of the order of summation.
    """
    tree = to_tree(run)
    precision = tree["train"]["precision"]
    for key in NOT_IDENTITY:
        _drop(tree, key.split("."))
    return {**tree, "train": {"precision": precision}}


def _drop(tree: dict[str, Any], parts: Sequence[str]) -> None:
    head, *rest = parts
    for key in list(tree) if head == "*" else [head]:
        if not rest:
            tree.pop(key, None)
        elif isinstance(tree.get(key), dict):
            _drop(tree[key], rest)


def environment_path(text: str, key: str) -> Path:
    """A path with `$NAME` and `~` filled in.

    Raises:
        ConfigError: when a variable is not set.
    """
    filled = os.path.expanduser(os.path.expandvars(text))
    if unset := re.search(r"\$\{?(\w+)", filled):
        raise ConfigError(f"{key} = {text!r}: the environment variable {unset[1]} is not set; set it or give the path")
    return Path(filled)


def _between(value: float, low: float, high: float) -> bool:
    return low <= value <= high


def check(run: Run) -> Iterator[str]:
    """Everything in a typed run that cannot work, one line each: key, value, what is allowed."""
    d, m, t = run.data, run.model, run.train
    yield from _positive("data", d, "vocab_size")
    yield from _positive("model", m, "layers", "width", "heads", "max_length")
    yield from _positive("train", t, "log_every", "checkpoint_every", "keep", "eval_sequences")
    yield from _natural("data", d, "min_chars", "max_bad_lines", "workers")
    yield from _natural("train", t, "threads", "eval_every")
    for name in ("dropout", "attention_dropout"):
        if not 0 <= getattr(m, name) < 1:
            yield f"model.{name} = {getattr(m, name)}: must be 0 or more and below 1"
    if not run.name or "/" in run.name or run.name in (".", ".."):
        yield f"name = {run.name!r}: must be a word without '/'; it names the run folder"
    for kind, names in (("phases", run.phases), ("finetune", run.finetune)):
        for name in names:
            if not re.fullmatch(r"[\w-]+", name):
                yield f"{kind}.{name}: a name must be of letters, digits, '_' and '-', so that overrides and files can have it"
    if not _between(run.seed, 0, 2**32 - 1):
        yield f"seed = {run.seed}: must be 0 to 2^32-1"
    if not d.paths:
        yield "data.paths = []: name at least one file or folder"
    if not _between(d.valid_fraction, 0.0, 0.5):
        yield f"data.valid_fraction = {d.valid_fraction}: must be 0 to 0.5"
    if d.vocab_file:
        yield from _vocab_problems(d)
    if m.heads > 0 and m.width % m.heads:
        yield f"model.heads = {m.heads}: must divide model.width = {m.width}"
    if m.ffn < 0:
        yield f"model.ffn = {m.ffn}: must be positive, or 0 for four times the width"
    if not run.phases:
        yield "phases = {}: name at least one phase"
    for name, phase in run.phases.items():
        yield from _phase_problems(f"phases.{name}", phase, m)
    for name, task in run.finetune.items():
        yield from _finetune_problems(f"finetune.{name}", task, m)


def _positive(prefix: str, part: Any, *names: str) -> Iterator[str]:
    return (f"{prefix}.{n} = {getattr(part, n)}: must be above 0 and finite" for n in names if not 0 < getattr(part, n) < math.inf)


def _natural(prefix: str, part: Any, *names: str) -> Iterator[str]:
    return (f"{prefix}.{n} = {getattr(part, n)}: must be 0 or more, and finite" for n in names if not 0 <= getattr(part, n) < math.inf)


def _share(prefix: str, part: Any, *names: str) -> Iterator[str]:
    return (f"{prefix}.{n} = {getattr(part, n)}: must be 0 to 1" for n in names if not _between(getattr(part, n), 0.0, 1.0))


def _vocab_problems(data: Data) -> Iterator[str]:
    try:
        path = environment_path(data.vocab_file, "data.vocab_file")
        # Not splitlines(): a piece may be one of Unicode's own line ends.
        lines = path.read_bytes().decode().removesuffix("\n").count("\n") + 1
    except ConfigError as error:
        yield str(error)
    except (OSError, UnicodeDecodeError) as error:
        yield f"data.vocab_file = {data.vocab_file!r}: cannot be read ({error})"
    else:
        if lines != data.vocab_size:
            yield f"data.vocab_size = {data.vocab_size}: {data.vocab_file} has {lines} pieces; set data.vocab_size={lines} or give another file"


def _phase_problems(key: str, phase: Phase, model: Model) -> Iterator[str]:
    yield from _positive(key, phase, "steps", "global_batch", "micro_batch", "max_predictions")
    yield from _share(key, phase, "short_fraction", "mask_rate")
    if not 8 <= phase.length <= model.max_length:
        yield f"{key}.length = {phase.length}: must be 8 to model.max_length = {model.max_length}"
    if phase.mask_rate == 0:
        yield f"{key}.mask_rate = 0: must be above 0, else there is nothing to predict"
    if min(phase.micro_batch, phase.global_batch) > 0 and phase.global_batch % min(phase.micro_batch, phase.global_batch):
        yield f"{key}.global_batch = {phase.global_batch}: cannot be cut into micro-batches of {key}.micro_batch = {phase.micro_batch}; it must divide"
    yield from _optim_problems(f"{key}.optim", phase.optim)
    schedule, total = phase.optim.schedule, phase.optim.schedule.total or phase.steps
    if schedule.offset < 0 or schedule.offset + phase.steps > total:
        yield f"{key}.optim.schedule.total = {total}: must cover offset {schedule.offset} + {phase.steps} steps"


def _optim_problems(key: str, optim: Optim) -> Iterator[str]:
    yield from _positive(key, optim, "lr", "eps")
    yield from _natural(key, optim, "weight_decay", "max_grad_norm")
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield f"{key}.betas = {list(optim.betas)}: each must be 0 or more and below 1"
    if not _between(optim.schedule.warmup, 0, 1):
        yield f"{key}.schedule.warmup = {optim.schedule.warmup}: longer than the phase; it is a share of the steps, 0 to 1"
    yield from _positive(f"{key}.schedule", optim.schedule, "power")


def _finetune_problems(key: str, task: Finetune, model: Model) -> Iterator[str]:
    yield from _positive(key, task, "batch", "micro_batch", "epochs", "lr", "stride", "max_answer")
    yield from _natural(key, task, "max_rows", "weight_decay")
    yield from _share(key, task, "warmup")
    if not 8 <= task.length <= model.max_length:
        yield f"{key}.length = {task.length}: must be 8 to model.max_length = {model.max_length}"
    if min(task.micro_batch, task.batch) > 0 and task.batch % min(task.micro_batch, task.batch):
        yield f"{key}.batch = {task.batch}: cannot be cut into micro-batches of {key}.micro_batch = {task.micro_batch}; it must divide"
    if not task.seeds:
        yield f"{key}.seeds = []: name at least one seed"
    if not task.path and task.task != "docnames":
        yield f"{key}.path = '': name the folder that holds the data of {task.task!r}"


def _override(tree: dict[str, Any], override: str) -> None:
    import yaml

    key, equals, text = override.removeprefix("--").partition("=")
    if not equals:
        raise ConfigError(f"{override!r}: an override is written key=value, such as --phases.long.optim.lr=4e-3")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{key} = {text!r} is not a YAML value: {error}") from None
    *parents, last = key.split(".")
    node: Any = tree
    for part in parents:
        node = node.setdefault(part, {}) if isinstance(node, dict) else None
        if node is None:
            raise ConfigError(f"{key}: {part!r} holds no keys")
    if not isinstance(node, dict):
        raise ConfigError(f"{key}: {parents[-1]!r} is a value, it holds no keys")
    # `--data.paths=my/folder` should not need YAML's brackets, nor `--name=2026` its quotes.
    kind = _field_type(key.split("."))
    if get_origin(kind) is list and not isinstance(value, list):
        value = [value]
    if kind is str and not isinstance(value, str):
        value = text
    node[last] = value


def _field_type(parts: Iterable[Any]) -> Any:
    """The type of a key, or None for an unknown one."""
    kind: Any = Run
    for part in parts:
        if get_origin(kind) is dict:
            kind = get_args(kind)[1]
        elif get_origin(kind) in (list, tuple):
            kind = get_args(kind)[0]
        elif dataclasses.is_dataclass(kind):
            kind = get_type_hints(kind).get(str(part))
        else:
            return None
    return kind


def _boolean_problems(node: Any, *loc: Any) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Places of numbers given as true or false and the reverse, which pydantic would take for 1 and 0."""
    if isinstance(node, Mapping | list | tuple):
        for part, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _boolean_problems(value, *loc, part)
        return
    kind = _field_type(loc)
    if kind in (int, float, bool) and isinstance(node, bool) != (kind is bool):
        allowed = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        yield loc, f"{'.'.join(map(str, loc))} = {node!r}: must be {allowed}"


def _explain(loc: tuple[Any, ...], error: Mapping[str, Any]) -> str:
    """One pydantic error as key, value and what is allowed."""
    key = ".".join(str(part) for part in loc)
    if error["type"] == "unexpected_keyword_argument":
        allowed = [f.name for f in dataclasses.fields(_field_type(loc[:-1]))]
        near = difflib.get_close_matches(str(loc[-1]), allowed, 1)
        return f"{key} = {error['input']!r}: unknown key{f', did you mean {near[0]!r}?' if near else ';'} Allowed: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{key}: is missing and has no default"
    return f"{key} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def describe(kind: Any = Run, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every key of a recipe with its type, default and documentation, for `--help`."""
    from pydantic import TypeAdapter

    hints = get_type_hints(kind)
    schema = TypeAdapter(kind).json_schema()
    properties = schema.get("properties") or schema["$defs"][kind.__name__]["properties"]
    for f in dataclasses.fields(kind):
        hint = hints[f.name]
        key = f"{prefix}{f.name}"
        if get_origin(hint) is dict:
            yield from describe(get_args(hint)[1], f"{key}.NAME.")
        elif dataclasses.is_dataclass(hint):
            yield from describe(hint, f"{key}.")
        else:
            default: Any = "required"
            if f.default is not dataclasses.MISSING:
                default = f.default
            elif f.default_factory is not dataclasses.MISSING:
                default = f.default_factory()
            yield key, _type_name(hint), str(default), properties[f.name].get("description", "")


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    return getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)
