"""A run is one frozen value: load a recipe, override it, check it, save it.

The value's dataclasses are those of :mod:`overnight.config.schema`; pydantic reads and types the recipe (:func:`load_run`),
:func:`overnight.config.validate.validate_run` refuses values that cannot work. Both name the key, the value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

from overnight.config.continued import continued, continued_problems, without_continued
from overnight.config.fields import MACHINE, hints
from overnight.config.open_sizes import given_sizes, without_sizes
from overnight.config.precision import begun_precision, without_auto
from overnight.config.reading import member, read_section
from overnight.config.schema import RUNS, Run
from overnight.config.validate import validate_run
from overnight.errors import ConfigError
from overnight.machine import usual_precision
from overnight.state_files import parse_yaml, read_yaml


def recipes() -> dict[str, Path]:
    """The shipped recipes by name."""
    folder = Path(str(resources.files("overnight") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_run(
    recipe: str,
    overrides: Sequence[str] = (),
    completed: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    folder: Path | None = None,
) -> Run:
    """The run that a recipe and dotted overrides describe.

    Args:
        recipe: a shipped recipe's name or a YAML file.
        overrides: `phases.long.optim.lr=4e-3` and the like; values are YAML, but those of keys that are text, or lists of it, are taken as they stand, `null` alone excepted.
        completed: fills in what a recipe with an `init` leaves out.
        folder: where its run folder is now, whatever the recipe says.

    Raises:
        ConfigError: naming every wrong key, its value and what is allowed.
    """
    tree = read_recipe(recipe, overrides)
    if completed is not None and tree.get("init"):
        tree = completed(tree)
    if folder is not None:
        tree["out"] = str(folder)
    try:
        run = build_run(tree)
        begun = begun_precision(run.run_dir) if tree.get("precision") == "auto" else ""
        return build_run(tree | {"precision": begun}) if begun else run
    except ConfigError as error:
        if Path(recipe).name != "run.yaml":
            raise
        # Of a run folder: nobody has just written this recipe.
        raise ConfigError(f"{error}\n(as {recipe}{' and the command line say' if overrides else ' says'})") from None


def read_recipe(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a recipe and dotted overrides say, unchecked, as nested plain values; see :func:`load_run`."""
    path = recipes().get(recipe, Path(recipe))
    if not path.is_file():
        near = difflib.get_close_matches(recipe, recipes(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no recipe {recipe!r}: it is neither a file nor one of {', '.join(recipes())}{hint}")
    tree, nodes = read_yaml(path, "correct it, or put it back", ConfigError)
    if twice := sorted(_repeated(nodes)):
        raise ConfigError("\n".join(f"{path}:{line}: {key!r} is given twice; keep one of the two" for line, key in twice))
    if misread := sorted(_misread(nodes)):
        raise ConfigError("\n".join(f"{path}:{line}: {problem}" for line, problem in misread))
    named = _named(tree)
    for override in overrides:
        _override(tree, override)
    if unknown := list(_new_and_incomplete(tree, named)):
        raise ConfigError("\n".join(unknown))
    return tree


def _named(tree: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names that a recipe gives itself: of its phases and tasks."""
    kinds = [name for name, (hint, _) in hints(run_kind(tree)).items() if get_origin(hint) is Mapping]
    return {kind: list(tree[kind]) if isinstance(tree.get(kind), dict) else [] for kind in kinds}


def _new_and_incomplete(tree: Mapping[str, Any], named: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What is wrong with phases and tasks that overrides have made and that lack a key: most likely a name was misspelled."""
    what = {"phases": "phase"}
    for kind, names in _named(tree).items():
        before = named.get(kind, [])  # another network has other kinds
        if not all(isinstance(name, str) for name in before):  # which is refused as what it is
            continue
        required = [
            f.name for f in dataclasses.fields(_field_type([kind, ""], tree)) if f.default is f.default_factory is dataclasses.MISSING
        ] or ["task"]
        for name in names:
            lacking = [key for key in required if not isinstance(tree[kind][name], dict) or key not in tree[kind][name]]
            if name in before or not lacking:
                continue
            near = difflib.get_close_matches(str(name), before, 1)
            yield (
                f"{kind}.{name}: the recipe has no {what.get(kind, kind + ' task')} {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}. "
                f"It has: {', '.join(before) or 'none'}. To add it, give {', '.join(f'--{kind}.{name}.{key}=...' for key in lacking)} too"
            )


def _repeated(root: Any) -> Iterator[tuple[int, str]]:
    """Line (from 1) and name of each key that its mapping has already: YAML's reader silently takes the last."""
    for node in _nodes(root):
        if node.id == "mapping":
            names = [key for key, _ in node.value if key.id == "scalar"]
            yield from ((key.start_mark.line + 1, key.value) for i, key in enumerate(names) if key.value in [n.value for n in names[:i]])


def _misread(root: Any) -> Iterator[tuple[int, str]]:
    """Line (from 1) of each number that YAML takes for another one than people do, and what is wrong with it."""
    for node in _nodes(root):
        if node.id != "scalar" or not node.tag.endswith((":int", ":float")):
            continue
        if ":" in node.value:
            yield node.start_mark.line + 1, f"{node.value}: is a number to base 60 in YAML; write it in full, or a text in quotes"
        elif node.tag.endswith(":int") and re.fullmatch(r"[-+]?0[0-9_]+", node.value):
            yield (
                node.start_mark.line + 1,
                f"{node.value}: is a number to base 8 in YAML; write it without the leading 0, or a text in quotes",
            )


def _nodes(root: Any) -> Iterator[Any]:
    """Every node of a tree of YAML, once."""
    nodes, looked_at = [root], {id(None)}
    while nodes:
        node = nodes.pop()
        if id(node) in looked_at:  # an alias
            continue
        looked_at.add(id(node))
        yield node
        if node.id == "sequence":
            nodes += node.value
        elif node.id == "mapping":
            nodes += [value for _, value in node.value]


# Of each kind one: weights, and a tokenizer.
_OF_HUGGINGFACE = (("model.safetensors", "pytorch_model.bin"), ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))


def is_huggingface(folder: Path) -> bool:
    """Return whether a folder holds a model in the layout of Hugging Face, whole or not: no run, and no exported byte model, which has no tokenizer."""
    if any((folder / name).is_file() for name in ("run.yaml", "task.json")):
        return False
    if all(any((folder / name).is_file() for name in names) for names in _OF_HUGGINGFACE):
        return True
    config = folder / "config.json"
    return config.is_file() and b'"model_type"' in config.read_bytes()


def refuse_untrained(folder: Path) -> None:
    """Refuse the folder of a run that stopped before its training began: it has a budget or chosen sizes, and no recipe yet.

    Raises:
        ConfigError: it is one.
    """
    if not (folder / "run.yaml").exists() and any((folder / name).is_file() for name in ("budget.json", "size.json")):
        raise ConfigError(f"{folder} has no checkpoint yet; run its command again to train it")


def task_folder(folder: Path) -> Path:
    """Return the folder of a fine-tuned task as it lies in its run, `RUN/finetune/TASK`, where it is named by `.` or by a link; of any other the folder that is given."""
    places = folder, Path(os.path.abspath(folder)), Path(os.path.realpath(folder))  # the task may itself be a link in its run
    return next((place for place in places if place.parent.name == "finetune"), folder)


def meant(source: str) -> str:
    """Return what to add to a message about a name that does not exist, where a run folder below `runs` has it."""
    near = Path("runs") / source
    return f"; did you mean {near}?" if source and (near / "run.yaml").is_file() else ""


def stored_run(folder: Path, overrides: Sequence[str] = ()) -> Run:
    """Return the run of a run folder, or the settings of an exported byte model, found at the place where it is now.

    It has a precision, which `precision=auto` leaves as it is.

    Raises:
        ConfigError: when the folder is neither, or an override is wrong.
    """
    path = next((file for name in ("run.yaml", "config.json") if (file := folder / name).is_file()), None)
    if path is None and (folder / "task.json").is_file():
        raise ConfigError(f"{folder}: is a fine-tuned task; name its run folder, {task_folder(folder).parent.parent}")
    if path is None:
        refuse_untrained(folder)
        raise ConfigError(f"{folder} is neither a run folder (run.yaml) nor an exported byte model (config.json){meant(str(folder))}")
    if is_huggingface(folder):
        raise ConfigError(f"{folder} holds a model in the Hugging Face layout; name the run folder from which it was exported")
    # The vocabulary lies with the prepared data; the file that it was taken from may be gone, or be named by a variable.
    return load_run(str(path), ["data.vocab_file=", *without_auto(overrides)], folder=folder)


def machine_run(overrides: Sequence[str]) -> Run:
    """Return a run of no recipe, which says only what dotted overrides do of the machine and the data: for a model of others.

    It is computed in fp32 where they name no precision, and by `precision=auto`.

    Raises:
        ConfigError: naming every wrong key, its value and what is allowed.
    """
    tree: dict[str, Any] = {"name": "none", "phases": {"none": {"steps": 1, "global_batch_size": 1}}}
    for override in without_auto(overrides):
        _override(tree, override)
    return build_run(tree)


def build_run(tree: Mapping[str, Any]) -> Run:
    """Return the checked run that a plain mapping, as read from YAML, describes.

    Raises:
        ConfigError: naming every wrong key, its value and what is allowed.
    """
    problems = [*given_sizes(tree), *continued_problems(tree)]
    run: Run | None = None if problems else read_section(run_kind(tree), tree, "", problems)
    if run is not None:
        run = continued(run)
        if run.precision == "auto":
            run = dataclasses.replace(run, precision=usual_precision(run.compute.device))
        problems += validate_run(run)
    if run is None or problems:
        raise ConfigError("\n".join(problems))
    return run


def run_kind(tree: Mapping[str, Any]) -> type[Run]:
    """Return which kind of run a recipe is, by its `model.kind`.

    Raises:
        ConfigError: when there is no such network.
    """
    model = tree.get("model", {})
    name = model.get("kind", "bert") if isinstance(model, Mapping) else "bert"
    if not isinstance(name, str) or name not in RUNS:
        raise ConfigError(f"model.kind = {name!r}: must be one of {', '.join(RUNS)}")
    return RUNS[name]


def run_yaml(run: Run) -> str:
    """The run as YAML that :func:`load_run` reads back to an equal value."""
    import yaml

    # libyaml's, where it is there, takes a fifth of the time.
    return yaml.dump(to_tree(run), Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False, width=120)


def to_tree(run: Run) -> dict[str, Any]:
    """The run as nested plain values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    return without_continued(without_sizes(dict(plain(dataclasses.asdict(run)))))


_ABSENT = "(absent)"


def differences(a: Any, b: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys in which two trees differ, with both values; of a whole phase that only one has, only which."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            yield from differences(a.get(key, _ABSENT), b.get(key, _ABSENT), f"{prefix}.{key}" if prefix else str(key))
    elif not same_setting(a, b, prefix.rpartition(".")[2]):
        there, here = ("given" if isinstance(value, dict) and _ABSENT in (a, b) else value for value in (a, b))
        yield f"{prefix}: {there} there, {here} here"


def same_setting(a: Any, b: Any, key: str = "") -> bool:
    """Return whether two plain values of a key say the same here: `$DATA/books/` is also the path that it stands for, with or without the slash."""
    return bool(a == b or filled(a, key) == filled(b, key))


# Keys of paths, of which several spellings are one.
_PATHS = ("paths", "sources", "decontaminate", "vocab_file", "init")


def filled(value: Any, key: str = "") -> Any:
    """Return a plain value, nested or not, whose texts have `$NAME` and `~` filled in; a variable that is not set stays as it is.

    Args:
        key: of the value; a path of this machine has no slashes that say nothing (`./text//`).
    """
    if isinstance(value, dict):
        return {name: filled(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [filled(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    text = os.path.expanduser(os.path.expandvars(value))
    if key not in _PATHS or not text or "://" in text or text.startswith(("hf:", "builtin:")):
        return text
    path, *members = text.split("::", 1)  # two slashes in front would stay, three do not
    return "::".join([str(Path(f"//{path}" if path.startswith("/") else path)), *members])


def identity(run: Run) -> dict[str, Any]:
    """Return the part of a run that decides what pretraining learns: all settings but those marked :data:`MACHINE`.

    A run folder belongs to one identity. Precision, and the type of sums between processes, are part of it: they change the curve beyond rounding
    of the order of summation.
    """

    def marked(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {name: marked(getattr(value, name)) for name, (_, notes) in hints(type(value)).items() if MACHINE not in notes}
        if isinstance(value, Mapping):
            return {name: marked(inner) for name, inner in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return dict(marked(run))


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals:
        raise ConfigError(f"{override!r}: an override is written key=value, such as --phases.long.optim.lr=4e-3")
    kind = _field_type(key.split("."), tree)
    # What is text is taken as it stands: YAML would cut `logs #1` short, and read dates, numbers and mappings. So no path needs brackets or quotes.
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    value: Any = [text] if kind == list[str] else text
    if kind not in (str, list[str]) or quoted or text == "null" or (kind == list[str] and text[:1] in ("", "[")):
        value = _yaml_value(key, text)
    if get_origin(kind) in (list, tuple) and kind != list[str] and isinstance(value, str) and "," in value:
        raise ConfigError(f"{key} = {text!r}: a list is written in brackets: {key}=[{text}]")
    if get_origin(kind) is list and not isinstance(value, list | None):
        value = [value]
    *parents, last = key.split(".")
    node: Any = tree
    for part in parents:
        if isinstance(node, dict) and node.get(part) is None:  # absent, or a section without keys
            node[part] = {}
        inner = node[part] if isinstance(node, dict) else None
        if inner is None:
            raise ConfigError(f"{key}: {part!r} holds no keys")
        if isinstance(inner, dict):  # by an alias of YAML the same one may stand in several places, of which one is meant
            inner = node[part] = dict(inner)
        node = inner
    if not isinstance(node, dict):
        raise ConfigError(f"{key}: {parents[-1]!r} is a value, it holds no keys")
    if value is None and parents in [[name] for name in _named(tree)] and last in node:
        del node[last]  # a phase or task of the recipe, by `null`
    else:
        node[last] = value


def _yaml_value(key: str, text: str) -> Any:
    try:
        value, nodes = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{key} = {text!r} is not a YAML value: {error}") from None
    for _, problem in _misread(nodes):
        raise ConfigError(f"{key} = {problem}")
    return value


def _field_type(parts: Sequence[str], tree: Any) -> Any:
    """Return the type of a key in a recipe, or None for an unknown one."""
    kind: Any = run_kind(tree)
    for part in parts:
        tree = tree.get(part, {}) if isinstance(tree, Mapping) else {}
        if get_origin(kind) is Mapping:
            kind = get_args(kind)[1]
        elif dataclasses.is_dataclass(kind):
            kind, notes = hints(kind).get(part, (None, ()))  # type: ignore[arg-type]
            kind = member(kind, notes, tree)
        else:
            return None
    return kind
