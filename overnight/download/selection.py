"""Which files the words of a command stand for, and what can be done with them next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overnight.download.connection import Source
from overnight.download.datasets import DATASETS, GLUE_FOLDERS, Dataset, RemoteFile, book
from overnight.download.patience import Attempts
from overnight.download.wikipedia import wikipedia_files
from overnight.errors import ConfigError, first_names

OPTIONS = {
    "language": "wikipedia",
    "date": "wikipedia",
    "squad_version": "squad",
    "task": "glue",
    "category": "amazon",
    "year": "amazon",
    "ids": "gutenberg",
}
"""The options of a single dataset, and which it is."""


@dataclass(frozen=True)
class Choice:
    """What the options of the datasets say; None where nothing was said."""

    language: str | None = None
    date: str | None = None
    squad_version: str | None = None
    task: tuple[str, ...] | None = None
    category: tuple[str, ...] | None = None
    year: str | None = None
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SelectedDataset:
    """A dataset that was named, with the files that are to be downloaded of it."""

    dataset: Dataset
    variants: tuple[str, ...]
    files: tuple[RemoteFile, ...]


def check(names: Sequence[str], choice: Choice) -> None:
    """Check what can be checked without a network.

    Raises:
        ConfigError: a name that is none, an option of a dataset that is not named, or a value that the dataset does not have.
    """
    known = ", ".join(DATASETS)
    for name in names:
        if name not in DATASETS:
            raise ConfigError(f"{name!r}: is not one of {known}; `overnight download --list` says what they are")
    check_options(names, choice)
    for name in names:
        if name != "wikipedia":
            _variants(DATASETS[name], choice)


def check_options(names: Sequence[str], choice: Choice) -> None:
    """Check that every option is one of a dataset that is named.

    Raises:
        ConfigError: for one that is not.
    """
    for option, name in OPTIONS.items():
        if getattr(choice, option) is not None and name not in names:
            raise ConfigError(f"--{option.replace('_', '-')}: is an option of {name}, which is not among what is named")


def files_to_list(row: Dataset, choice: Choice) -> list[RemoteFile]:
    """Return the files that are known of a dataset, or those of them that its options ask for; of Wikipedia none is known without asking it.

    Raises:
        ConfigError: for a value that the dataset does not have.
    """
    asked = [option for option, name in OPTIONS.items() if name == row.name and getattr(choice, option) is not None]
    if row.name == "amazon" and asked == ["year"]:
        return [file for variant, files in row.variants.items() if variant.startswith(f"{choice.year}/") for file in files]
    variants = _variants(row, choice) if asked and row.variants else tuple(row.variants)
    return [file for variant in variants for file in _files(row, variant)]


def select(names: Sequence[str], choice: Choice, source: Source, attempts: Attempts) -> list[SelectedDataset]:
    """Return the files of the datasets that are named, each once; :func:`check` comes first.

    Raises:
        ConfigError: a language or a date that is none.
        DataError: where a dataset must be asked what it has, and does not say.
    """
    found = []
    for name in dict.fromkeys(names):
        row = DATASETS[name]
        if name == "wikipedia":
            language = choice.language or "en"
            files = tuple(wikipedia_files(language, choice.date or "latest", source, attempts))
            found.append(SelectedDataset(row, (language,), files))
        else:
            variants = _variants(row, choice)
            found.append(SelectedDataset(row, variants, tuple(file for variant in variants for file in _files(row, variant))))
    return found


def _files(row: Dataset, variant: str) -> tuple[RemoteFile, ...]:
    return row.variants[variant] if variant in row.variants else (book(int(variant)),)


def _variants(row: Dataset, choice: Choice) -> tuple[str, ...]:
    """Return which variants of a dataset are wanted."""
    if row.name == "squad" and choice.squad_version:
        return _known(row, (choice.squad_version,), "--squad-version")
    if row.name == "glue" and choice.task:
        return _known(row, choice.task, "--task")
    if row.name == "gutenberg" and choice.ids:
        if wrong := [number for number in choice.ids if not 0 < number < 10_000_000]:
            raise ConfigError(f"--ids = {wrong[0]}: must be the number of a book, as in https://www.gutenberg.org/ebooks/1342")
        return tuple(str(number) for number in dict.fromkeys(choice.ids))
    if row.name == "amazon":
        year = choice.year or "2014"
        if not choice.category:
            raise ConfigError(f"amazon: name --category; {year} has {', '.join(_categories(row, year))}")
        return _known(row, tuple(f"{year}/{category}" for category in choice.category), "--category")
    return row.default


def _known(row: Dataset, variants: tuple[str, ...], option: str) -> tuple[str, ...]:
    for variant in variants:
        if variant not in row.variants:
            year, _, name = variant.rpartition("/")
            there = _categories(row, year) if year else list(row.variants)
            raise ConfigError(f"{option} = {name}: is not one of {', '.join(there) or first_names(sorted(row.variants))}")
    return tuple(dict.fromkeys(variants))


def _categories(row: Dataset, year: str) -> list[str]:
    return [variant.partition("/")[2] for variant in row.variants if variant.startswith(f"{year}/")]


def next_command(selected: SelectedDataset, folder: Path) -> list[str]:
    """Return commands that use a dataset.

    Args:
        selected: the dataset.
        folder: of the download.
    """

    def at(path: str) -> str:
        return shlex.quote(str(folder / path))

    name, first = selected.dataset.name, selected.files[0].path
    if name == "wikipedia":
        return [f"overnight prepare bert-base --data.paths={at(first)}"]
    if name == "gutenberg":
        return [f"overnight prepare bert-base --data.paths={at('books')}"]
    if name == "amazon":
        return [f"overnight prepare mlstm-small --data.paths={at(path)} --data.field=reviewText" for path in _paths(selected)]
    if name == "squad" and selected.variants == ("2.0",):
        return [f"overnight predict squad --from RUN --input {at('squad-v2.0/dev-v2.0.json')}"]
    if name == "glue":
        return [f"overnight finetune {task} --from RUN --path={at(f'glue/{GLUE_FOLDERS[task]}')}" for task in selected.variants]
    if name == "blimp":
        return [f"overnight evaluate --from RUN --blimp {at('blimp')}"]
    return [f"overnight finetune {name} --from RUN --path={at(name)}"]


def _paths(selected: SelectedDataset) -> list[str]:
    return [file.path for file in selected.files]
