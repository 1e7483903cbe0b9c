"""Which rows of a task are trained on, which are set aside to choose by, and which are scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from overnight.config import Finetune, environment_path
from overnight.errors import DataError
from overnight.tasks.classification import load_task
from overnight.tasks.conll import Sentence, TokenData, load_tokens
from overnight.tasks.examples import Example, TaskData, check_draw, drawn, drawn_note, split_off, strata
from overnight.tasks.squad import Question, SquadData, load_squad

# All seeds of a task train on the same rows, so that their spread is that of the training alone.
_DRAW = 0
_NONE: tuple[str, ...] = ()

Row = TypeVar("Row")


@dataclass(frozen=True)
class TaskRows(Generic[Row]):
    """The training rows of a task that are used."""

    train: list[Row]
    """Trained on."""
    selection: list[Row]
    """Held back to choose by."""
    drawn: list[Row]
    """Both, in their order."""
    notes: tuple[str, ...]
    together: int = 1
    """So many rows to train on at a time belong in one batch."""


def load_texts(spec: Finetune) -> TaskData:
    """Read a task of texts; errors are those of :func:`overnight.tasks.classification.load_task`."""
    return load_task(spec.task, environment_path(spec.path, "finetune.path"), spec.dev_seed, spec.columns, _dev(spec), spec.dev_share)


def load_sentences(spec: Finetune) -> TokenData:
    """Read a task of words with tags; errors are those of :func:`overnight.tasks.conll.load_tokens`."""
    return load_tokens(environment_path(spec.path, "finetune.path"), spec.dev_seed, _dev(spec), spec.dev_share)


def load_questions(spec: Finetune) -> SquadData:
    """Read a task of questions; errors are those of :func:`overnight.tasks.squad.load_squad`."""
    return load_squad(environment_path(spec.path, "finetune.path"), _dev(spec), spec.max_misplaced_answers, spec.dev_seed)


def _dev(spec: Finetune) -> Path | None:
    return environment_path(spec.dev, "finetune.dev") if spec.dev else None


def text_rows(spec: Finetune, task: TaskData) -> TaskRows[Example]:
    """Return the training rows of a task of texts that are used.

    Raises:
        DataError: there are too few.
    """
    train, notes, together = task.train, _NONE, task.rows_together
    if 0 < spec.max_train_examples < len(train):
        check_draw(spec.max_train_examples, strata(train))
        train = [train[i] for i in drawn([_text(example) for example in train], spec.max_train_examples, _DRAW, strata(train))]
        notes, together = (drawn_note(len(train), len(task.train), by_label=task.kind != "regression"),), 1
    labels = strata(train) if together == 1 else [""] * len(train)
    rest, selection, more = hold_back(spec, train, [_text(example) for example in train], labels, together)
    return TaskRows(rest, selection, train, notes + more, together)


def _text(example: Example) -> str:
    return f"{example.text_a}\x00{example.text_b or ''}"


def sentence_rows(spec: Finetune, data: TokenData) -> TaskRows[Sentence]:
    """Return the training sentences that are used; errors as of :func:`text_rows`."""
    train, notes = data.train, _NONE
    if 0 < spec.max_train_examples < len(train):
        train = [train[i] for i in drawn([" ".join(s.words) for s in train], spec.max_train_examples, _DRAW)]
        notes = (drawn_note(len(train), len(data.train), "sentences", by_label=False),)
    rest, selection, more = hold_back(spec, train, [" ".join(sentence.words) for sentence in train])
    return TaskRows(rest, selection, train, notes + more)


def question_rows(spec: Finetune, data: SquadData) -> TaskRows[Question]:
    """Return the training questions that are used: those whose answers stand where their file says, and those that have none.

    Raises:
        DataError: there are too few, or no answer stands there.
    """
    placed, notes = [q for q in data.train if q.impossible or any(answer.start >= 0 for answer in q.answers)], _NONE
    if not placed:
        raise DataError(f"{spec.path}: no answer to train on is at its answer_start; correct the positions")
    if 0 < spec.max_train_examples < len(placed):
        chosen = drawn([f"{q.context}\x00{q.question}" for q in placed], spec.max_train_examples, _DRAW)
        notes = (drawn_note(len(chosen), len(placed), "questions", by_label=False),)
        placed = [placed[i] for i in chosen]
    rest, selection, more = hold_back(spec, placed, [q.context for q in placed])
    return TaskRows(rest, selection, placed, notes + more)


def hold_back(
    spec: Finetune, rows: list[Row], texts: Sequence[str], labels: Sequence[str] = (), together: int = 1
) -> tuple[list[Row], list[Row], tuple[str, ...]]:
    """Split the rows that something is chosen by off the training rows, where that is asked for (`select_on: train`).

    Args:
        rows: to train on.
        texts: of each; equal ones stay on one side.
        labels: of each; none where all are alike.
        together: so many rows at a time stay on one side.

    Returns:
        the rows to train on, those to choose by, and notes.

    Raises:
        DataError: when there are too few.
    """
    if not spec.selects or spec.select_on == "dev":
        return rows, [], ()
    groups = ["\x01".join(texts[i : i + together]) for i in range(0, len(rows), together)]
    remedy = "raise --select_share, or choose by the dev rows with --select_on=dev"
    chosen = split_off(groups, labels[::together] or [""] * len(groups), spec.dev_seed, spec.select_share, "the training rows", remedy)
    train, selection_rows = ([row for i, row in enumerate(rows) if (i // together in chosen) == side] for side in (False, True))
    return train, selection_rows, (f"{len(selection_rows):,} of {len(rows):,} training rows are set aside to choose by, not trained on",)
