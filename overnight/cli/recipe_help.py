"""The help of the commands that take a recipe: how to begin, then every key by section, of a named recipe only those its network has."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from overnight import config
from overnight.config.describe import ANY, Setting, describe, in_training
from overnight.config.schema import ENCODERS, RUNS
from overnight.config.validate import COMPUTE_SETTINGS, DATA_SETTINGS, PHASE_SETTINGS
from overnight.display import folded, yaml_text

# What a command is begun with, and which sections it reads.
_EXAMPLES: dict[str, list[tuple[str, str]]] = {
    "run": [
        ("demo", "minutes, no data needed"),
        ("my.yaml --name=mine --data.paths=FOLDER", "your own text; run again to continue"),
        ("demo --phases.short.optim.lr=4e-3 --precision=bf16", "any keys changed"),
        ("my.yaml --budget=8h", "done in eight hours"),
    ],
    "prepare": [("bert-mini-books --data.paths=FOLDER --data.workers=8", "shards in data/bert-mini-books")],
    "pretrain": [("demo --name=mine --checkpoint.save_every=50", "run again to continue")],
    "launch": [
        ("bert-base --processes=8", "eight GPUs on this machine"),
        ("bert-large-lamb --nodes=4 --slurm --time=1-00:00:00 > job.sh", "a script for sbatch"),
    ],
    "plan": [("bert-large-lamb --tensors", "lists every tensor with its group"), ("my.yaml --budget=8h", "what fits in eight hours")],
}
_MACHINE = ("compute", "memory", "distributed", "stability", "checkpoint", "logging")
_PRETRAINING = ("run", "data", "model", "phases", "optim", *_MACHINE)
_SECTIONS_OF = {"prepare": ("run", "data"), "pretrain": _PRETRAINING, "launch": _PRETRAINING, "plan": _PRETRAINING}
_TITLES = {
    "run": "run: its name, folder and seed",
    "data": "data: where the text comes from and how it becomes token shards",
    "model": "model: the network",
    "phases": "phases: pretraining phases, in order; you choose NAME",
    "optim": "optim: optimizer, learning-rate scaling and schedule of a phase",
    "compute": "compute: where and how this machine computes",
    "memory": "memory: less memory for more time",
    "distributed": "distributed: how several processes share a step",
    "stability": "stability: what to do about gradients that are not finite, spikes, and replicas that differ",
    "checkpoint": "checkpoint: when to save the training state, and which checkpoints to keep",
    "logging": "logging: what to measure and log during training",
    "evaluation": "evaluation: what to measure after pretraining, besides the validation text",
    "finetune": "finetune: tasks to fine-tune on after pretraining; you choose NAME",
    "linear_probe": "linear_probe: tasks for the features of a byte model; you choose NAME",
}
# Wider lines are hard to read, whatever the terminal has.
_WIDEST = 110


def recipe_help(command: str, recipe: str | None, parser: argparse.ArgumentParser) -> str:
    """Return the help of a command that takes a recipe.

    Args:
        command: such as `run`.
        recipe: what the user named besides --help; None shows the keys of all networks.
        parser: of this command, whose options are listed.

    Raises:
        ConfigError: when the recipe is not there or cannot be read.
    """
    tree = config.read_recipe(recipe) if recipe else {}
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    lines = [f"usage: overnight {command} RECIPE [options] [--key=value ...]", "", "examples:"]
    examples = [(f"overnight {command} {words}", why) for words, why in _EXAMPLES[command]]
    examples.append((f"overnight {command} {recipe or 'mlstm-small'} --help", "the keys of that recipe"))
    wide = max(len(words) for words, _ in examples)
    if wide + max(len(why) for _, why in examples) + 4 <= width:
        lines += [f"  {words:{wide}}  {why}" for words, why in examples]
    else:  # folded, the columns would not be any
        lines += [line for words, why in examples for line in (f"  {words}", f"      {why}")]
    lines += ["", f"RECIPE is a YAML file or one of: {', '.join(config.recipes())}", ""]
    actions = [action for action in parser._actions if action.option_strings]
    options = [(", ".join(action.option_strings) + (f"={action.metavar}" if action.metavar else ""), action.help) for action in actions]
    wide = max(len(name) for name, _ in options)
    lines += ["options:", *(f"  {name:{wide}}  {text}" for name, text in options)]
    model = tree.get("model") or {}
    kind = model.get("kind", "bert") if recipe and isinstance(model, dict) else None
    kind = kind if kind in RUNS else None
    lines += ["", f"keys of {recipe}, where model.kind={kind}:" if kind else "keys of a recipe:", *_keys(command, kind, tree, recipe or "")]
    if command in _SECTIONS_OF:
        lines += ["", "the other keys of a recipe: overnight run --help"]
    return "\n".join(folded(line, width) for line in lines)


def settings(command: str, kind: str | None) -> Iterator[Setting]:
    """Yield the settings that a command reads, of one kind of network or of all (None)."""
    for row in describe({"": RUNS[kind]} if kind else ANY, network=kind or ""):
        if _section(row.key) in _SECTIONS_OF.get(command, _TITLES) and not (kind and _does_nothing(row.key, kind)):
            yield in_training(row, of_bytes=bool(kind) and kind not in ENCODERS)


def _keys(command: str, kind: str | None, tree: Mapping[str, Any], recipe: str) -> Iterator[str]:
    """The sections that a command reads, each with a title, and two lines a key."""
    sections: dict[str, list[str]] = {}
    for key, type_name, default, text in settings(command, kind):
        if type_name.count("|") > 7:  # too many for the line of the key
            type_name, text = "WORD", f"{text} One of {type_name.replace('|', ', ')}."
        values = dict.fromkeys(yaml_text(value) for value in _values(tree, key.split(".")))
        said = [*([f"{recipe}: {', '.join(values)}"] if values else []), default if default == "required" else f"default: {default}"]
        sections.setdefault(_section(key), []).extend([f"  --{key}={type_name}", f"      {text} ({'; '.join(said)})"])
    for section in _TITLES:
        if section in sections:
            yield from ("", _TITLES[section], *sections[section])


def _does_nothing(key: str, kind: str) -> bool:
    section, _, name = key.partition(".")
    if section == "compute":
        return kind not in COMPUTE_SETTINGS.get(name, (kind,))
    if section == "phases":
        return kind not in PHASE_SETTINGS.get(name.partition(".")[2], (kind,))
    other = DATA_SETTINGS["bytes" if kind in ENCODERS else "wordpiece"]
    return section == "data" and name in other


def _section(key: str) -> str:
    parts = key.split(".")
    return "run" if len(parts) == 1 else "optim" if parts[2:3] == ["optim"] else parts[0]


def _values(tree: Any, parts: Sequence[str]) -> Iterator[Any]:
    """What a recipe says for a key; of every phase or task where the key has a NAME."""
    if not parts:
        yield tree
    elif isinstance(tree, Mapping):
        for name in tree if parts[0] == "NAME" else [parts[0]] if parts[0] in tree else []:
            yield from _values(tree[name], parts[1:])
