"""Completion in the shell: commands and options as the parser has them, recipes, and the keys of a recipe, a task or a run.

The script that `overnight completion SHELL` prints calls `overnight` with the line so far in its environment, where argcomplete reads it and answers.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import argcomplete
from argcomplete.completers import ChoicesCompleter, DirectoriesCompleter, FilesCompleter
from argcomplete.lexers import split_line

from overnight import config
from overnight.cli.recipe_help import settings
from overnight.cli.task_keys import is_run_level
from overnight.config.describe import Setting, describe
from overnight.config.schema import RUNS, Finetune, LinearProbe
from overnight.download.datasets import DATASETS
from overnight.errors import UserError

_DATASETS = {
    "dataset": tuple(DATASETS),
    "category": sorted({variant.partition("/")[2] for variant in DATASETS["amazon"].variants}),
}
_TASKS = {"finetune": Finetune, "linear-probe": LinearProbe}


def complete(parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Answer a shell that asks how its line may continue, and end the process."""
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    words = split_line(line, point)[3][int(os.environ["_ARGCOMPLETE"]) :]  # without the program
    name = words[0] if words else ""
    command = commands.get(name, parser)
    actions = {action.dest: action for action in command._actions}
    for action in actions.values():
        if action.dest == "recipe":
            action.completer = _recipes_and_files  # type: ignore[attr-defined]
        elif action.dest == "source":
            action.completer = DirectoriesCompleter()  # type: ignore[attr-defined]
        elif name == "download" and action.dest in _DATASETS:
            action.completer = ChoicesCompleter(_DATASETS[action.dest])  # type: ignore[arg-type, attr-defined]
        elif action.dest == "task" and name in _TASKS and not action.option_strings:
            tasks = next(row.type for row in describe({"": _TASKS[name]}) if row.key == "task")
            action.completer = ChoicesCompleter(tasks.split("|"))  # type: ignore[arg-type, attr-defined]
    for kind in (kind for action in command._actions if isinstance(action.choices, dict) for kind in action.choices.values()):
        for action in kind._actions:
            if action.dest in ("folder", "other"):  # of `overnight data ...`
                action.completer = DirectoriesCompleter()  # type: ignore[attr-defined]
    if command.get_default("takes_keys"):
        _add_keys(command, _recipe_keys(name, words[1:]) if "recipe" in actions else _run_keys(name))
    argcomplete.autocomplete(parser, always_complete_options=False)


def _run_keys(command: str) -> Iterator[Setting]:
    if command in _TASKS:
        yield from describe({"": _TASKS[command]})
    yield from (row for row in describe() if is_run_level(row.key, command))


def _recipe_keys(command: str, words: list[str]) -> Iterator[Setting]:
    """Yield the keys of the recipe that is named so far, with the names of its phases and tasks; of any recipe, those without such names."""
    tree: dict[str, Any] = {}
    for word in words:
        path = Path(word) / "run.yaml"
        recipe = str(path) if path.is_file() else word
        if recipe in config.recipes() or recipe.endswith((".yaml", ".yml")):
            try:
                tree = config.read_recipe(recipe)
            except UserError:  # the command will say it
                continue
    model = tree.get("model") or {}
    kind = model.get("kind", "bert") if tree and isinstance(model, dict) else None
    for row in settings(command, kind if kind in RUNS else None):
        section = row.key.partition(".")[0]
        names = tree.get(section) if ".NAME." in row.key else [""]
        yield from (row._replace(key=row.key.replace("NAME", str(name), 1)) for name in names or ())


def _add_keys(command: argparse.ArgumentParser, keys: Iterable[Setting]) -> None:
    for key, kind, _, text in keys:
        if f"--{key}" in command._option_string_actions:
            continue
        choices = kind.split("|") if "|" in kind else ["true", "false"] if kind == "bool" else None
        command.add_argument(f"--{key}", choices=choices, help=first_sentence(text).replace("%", "%%"))


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text on one line, without its period; the one of "et al." ends none."""
    return re.split(r"(?<!\bal)\. ", " ".join(text.split()), maxsplit=1)[0]


def _recipes_and_files(prefix: str, **_: object) -> list[str]:
    files = FilesCompleter(("yaml", "yml"))
    return [*config.recipes(), *files(prefix)]
