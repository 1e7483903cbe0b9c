"""The classes of one's own table: found in the training rows, asked of the others, and what is said of them beside a score."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from overnight.display import plural
from overnight.errors import DataError, first_names
from overnight.tasks.examples import Example

# More classes than this are numbers in the wrong column, or ids.
_MOST_CLASSES = 1000
NO_CORRELATION = "every {} has score {:g}, so no correlation with them is defined: 0.0 says nothing"
"""A note on rows that :func:`have_one_number`."""


def classes_of(train: list[Example], path: Path, kind: str) -> tuple[str, ...]:
    """Return the classes of the training rows, sorted.

    Args:
        train: classified, with any number of classes each where `kind` is `multi_label`.
        path: their file, for errors.

    Raises:
        DataError: there are too few or too many, or all rows have the same.
    """
    found = [label for row in train for label in (row.label if isinstance(row.label, tuple) else (str(row.label),))]
    labels = sorted(set(found))
    if kind == "multi_label" and not labels:
        raise DataError(f"{path}: no training row has a label")
    if kind == "multi_label" and len({frozenset(_labels_of(row)) for row in train}) == 1:
        raise DataError(f"{path}: every training row has the same classes ({first_names(labels)}); there is nothing to learn")
    if kind == "classification" and len(labels) < 2:
        raise DataError(f"{path}: every training row has label {labels[0]!r}; a classifier needs two or more")
    if len(labels) > _MOST_CLASSES:
        raise DataError(f"{path}: {len(labels)} different labels; call the column `score` if they are numbers")
    return tuple(labels)


def check_labels(examples: list[Example], labels: tuple[str, ...], path: Path) -> None:
    """Check that rows have no class that training rows lack.

    Raises:
        DataError: naming the first such row, and how many there are.
    """
    known = set(labels)
    unknown = [(row.id, label) for row in examples for label in _labels_of(row) if label not in known]
    if not unknown:
        return
    first, label = unknown[0]
    said = f"{path}: row {first} has label {label!r}, which no training row has ({', '.join(labels[:10])})"
    if (count := len({row for row, _ in unknown})) > 1:
        others = list(dict.fromkeys(repr(label) for _, label in unknown))
        said += f"; {count:,} of {len(examples):,} rows have one of these: {first_names(others)}"
    raise DataError(f"{said}. Take such rows out, or put rows of theirs among those to train on")


def label_notes(labels: tuple[str, ...], train: list[Example], dev: list[Example], test: list[Example]) -> tuple[str, ...]:
    """Return what is to be said of the classes beside a score; of a regression, which has none, of its numbers."""
    return (*_alike(labels), *_unscored(labels, dev), *_half_labeled(test), *_one_number(train))


def _one_number(train: list[Example]) -> tuple[str, ...]:
    """Return a note where all training rows of a regression have the same number."""
    return (f"every training row has score {train[0].label:g}, so there is nothing to learn",) if have_one_number(train) else ()


def have_one_number(rows: Sequence[Example]) -> bool:
    """Return whether rows have the same number each, as a single row has: no correlation with them is defined."""
    return bool(rows) and isinstance(rows[0].label, float) and all(row.label == rows[0].label for row in rows)


def _labels_of(row: Example) -> tuple[str, ...]:
    """Return the classes of a row; none where they are not known."""
    return row.label if isinstance(row.label, tuple) else () if row.label is None else (str(row.label),)


def _alike(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return a note that names classes which are the same but for case, white space or how a number is written."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        try:
            same = f"{float(label):g}"
        except ValueError:
            same = " ".join(label.casefold().split())
        groups.setdefault(same, []).append(label)
    found = [" and ".join(map(repr, group)) for group in groups.values() if len(group) > 1]
    return (f"{first_names(found)} are different classes, though written nearly alike",) if found else ()


def _unscored(labels: tuple[str, ...], dev: list[Example]) -> tuple[str, ...]:
    """Return a note that names the classes of which no row is scored."""
    scored = {label for row in dev for label in _labels_of(row)}
    missing = [label for label in labels if label not in scored]
    return (
        (f"no row to score on has {plural(len(missing), 'class', 'classes')} of {len(labels):,}: {first_names(missing)}",)
        if missing
        else ()
    )


def _half_labeled(test: list[Example]) -> tuple[str, ...]:
    """Return a note where some test rows have a label and some have none: they cannot be scored."""
    missing = sum(row.label is None for row in test)
    return (
        (f"{missing:,} of {len(test):,} test rows have no label, so they are answered and none is scored",)
        if 0 < missing < len(test)
        else ()
    )
