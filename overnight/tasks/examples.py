"""Rows of a labeled task, and the task as one value."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from overnight.errors import ConfigError, DataError
from overnight.state_files import digest_of


@dataclass(frozen=True)
class Example:
    """One example: a text or a pair of texts, and what it should be answered with (None where that is not known)."""

    id: str
    """Unique within its split: the file's own index, or the 0-based number of the row."""
    text_a: str
    text_b: str | None
    label: str | float | tuple[str, ...] | None
    """A label for classification, any number of them for multi-label classification, a number for regression."""


def digest_of_texts(examples: Iterable[Example]) -> str:
    """Return a hash of the ids and texts of rows: with others they are to be answered anew."""
    return digest_of([(example.id, example.text_a, example.text_b) for example in examples])


@dataclass(frozen=True)
class TaskData:
    """A task read into memory."""

    name: str
    kind: Literal["classification", "multi_label", "regression"]
    labels: tuple[str, ...]
    """The classes in the order of the classifier's outputs; empty for regression."""
    train: list[Example]
    dev: list[Example]
    test: list[Example]
    """Empty where the task has none; its labels may be None."""
    main_metric: str
    """The key of :func:`overnight.finetune.metrics.score` by which the task is scored."""
    extra: dict[str, list[Example]] = field(default_factory=dict)
    """Further splits to score or predict, by name: `dev_mismatched` and `test_mismatched` of MNLI."""
    notes: tuple[str, ...] = ()
    """What a reader of the score has to know: which split was made here, which rows were left out."""
    rows_together: int = 1
    """So many training rows at a time differ in one of their texts only, and are best seen in one batch; divides their number."""
    columns: tuple[str, ...] = ()
    """Of one's own table, the columns that its texts were read from."""
    is_dev_made: bool = False
    """Whether the dev rows were split off the training rows here, because there were none."""


def in_validation(text: str, seed: int, share: float = 0.1) -> bool:
    """Return whether a row belongs to the validation part: a function of its text, so that equal texts are never on both sides.

    Args:
        text: what decides (the row's texts, not its position).
        seed: another seed splits off other rows.
        share: expected size of the validation part (0 to 1).
    """
    digest = hashlib.blake2b(f"{seed}\x00{text}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def split(examples: list[Example], seed: int, where: str) -> tuple[list[Example], list[Example]]:
    """Split off a tenth of the rows by a hash of their texts.

    Args:
        examples: all labeled rows.
        seed: which tenth.
        where: the file or folder, for the message.

    Returns:
        (train, dev), each in the order given.

    Raises:
        DataError: if one of the two would be empty.
    """
    train: list[Example] = []
    dev: list[Example] = []
    for example in examples:
        (dev if in_validation(f"{example.text_a}\x00{example.text_b or ''}", seed) else train).append(example)
    if not train or not dev:
        raise DataError(f"{where}: {len(examples)} rows are too few to split off a tenth for evaluation; give more of them")
    return train, dev


def strata(examples: Sequence[Example]) -> list[str]:
    """Return what rows are shared out by, so that each class is in its share: their class, of several the rarest, of none and of a number nothing.

    Nearly every set of many classes is there once, so sets as they are would be no share of anything.
    """
    counts = Counter(label for example in examples if isinstance(example.label, tuple) for label in example.label)
    return [_stratum(example.label, counts) for example in examples]


def _stratum(label: str | float | tuple[str, ...] | None, counts: Counter[str]) -> str:
    if isinstance(label, tuple):
        return min(label, key=lambda one: (counts[one], one), default="")
    return label if isinstance(label, str) else ""


def split_off(
    texts: Sequence[str],
    labels: Sequence[str],
    seed: int,
    share: float,
    where: str,
    remedy: str = "put the rows to score on beside those to train on, as dev.* and train.* in a folder, and name that",
) -> set[int]:
    """Return the rows to score on where there is no file for that: a share of the different texts, of each label alike, drawn by a hash.

    Equal texts are on one side, and of every label one is trained on.

    Args:
        texts: of each row.
        labels: of each row; all equal where there are none.
        seed: another seed takes other texts.
        share: of the texts (0 to 1).
        where: the file or folder, for the message.
        remedy: what to do where there are too few, for the message.

    Raises:
        DataError: if one of the two sides would be empty.
    """
    label_of: dict[str, str] = {}
    for text, label in zip(texts, labels, strict=True):
        label_of.setdefault(text, label)
    kept: dict[str, str] = {}
    for text in sorted(label_of):
        kept.setdefault(label_of[text], text)  # of every label one is trained on, whatever is drawn
    # A label whose texts all stand under another first has none of its own.
    for label, text in sorted((label, text) for text, label in zip(texts, labels, strict=True) if label not in kept):
        kept.setdefault(label, text)
    trained = set(kept.values())
    pool = [text for text in label_of if text not in trained]
    taken = {pool[i] for i in drawn(pool, max(1, round(share * len(label_of))), seed, [label_of[text] for text in pool])}
    rows = {index for index, text in enumerate(texts) if text in taken}
    if not pool and len(kept) > 1:
        raise DataError(
            f"{where}: none of the {len(kept):,} classes has two texts, one to train on and one to split off for evaluation; {remedy}"
        )
    if not rows or len(rows) == len(texts):
        raise DataError(f"{where}: {len(texts)} rows are too few to split off {share:g} of them for evaluation; {remedy}")
    return rows


def drawn(texts: Sequence[str], count: int, seed: int, labels: Sequence[str] = ()) -> list[int]:
    """Return which rows to take where `max_train_examples` asks for fewer: each label in its share, no label left out.

    A row is ranked by a hash of the seed and its text, so the draw depends neither on the order of the file nor on the machine, and a
    larger one holds every smaller one. Labels get their rows as seats are dealt by Sainte-Laguë, after one for each.

    Args:
        texts: what identifies each row; equal ones are distinguished by how often they came before.
        count: rows to take; all where there are fewer.
        seed: another seed takes other rows.
        labels: the label of each row; without, all rows are alike.

    Returns:
        indices, ascending.
    """
    came: Counter[str] = Counter()
    groups: dict[str, list[tuple[bytes, int]]] = {}
    for index, text in enumerate(texts):
        came[text] += 1
        rank = hashlib.blake2b(f"{seed}\x00{came[text]}\x00{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        groups.setdefault(labels[index] if labels else "", []).append((rank, index))
    queue = [
        (place > 0, (place + 0.5) / len(group), rank, index)
        for group in groups.values()
        for place, (rank, index) in enumerate(sorted(group))
    ]
    return sorted(index for *_, index in sorted(queue)[:count])


def check_draw(count: int, labels: Sequence[str]) -> None:
    """Check that a draw of `max_train_examples` has a row of each label.

    Args:
        count: rows to draw, fewer than there are.
        labels: of each row.

    Raises:
        ConfigError: it is too few for that.
    """
    if count < (least := len(set(labels))):
        raise ConfigError(
            f"max_train_examples = {count}: leaves some of {least:,} classes without a row to train on; give {least:,} or more"
        )


def drawn_note(count: int, of: int, what: str = "rows", by_label: bool = True) -> str:
    """Return what to say of a draw next to its score."""
    return f"trained on {count:,} of {of:,} {what}, drawn by a hash of their texts" + (", each label in its share" if by_label else "")


def trained_on_note(
    train: Iterable[Hashable], scored: Sequence[Hashable], what: str = "rows to score on", of: str = "text"
) -> tuple[str, ...]:
    """Return a note that counts the rows to score on whose text is trained on too; nothing where there is none.

    Args:
        train: the texts to train on.
        scored: the text of each row to score on.
        what: the rows are called.
        of: what is alike.
    """
    seen = set(train)
    count = sum(text in seen for text in scored)
    return (
        (f"the {of} of {count:,} of {len(scored):,} {what} is also trained on, so their score says little about others",) if count else ()
    )
