"""Rows to token ids: [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

Shapes: T tokens of one row, special tokens included.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from overnight.errors import DataError
from overnight.tasks.examples import Example, TaskData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from overnight.corpus.tokenizer import Vocabulary

# Rows tokenized at once: bounds the memory of the intermediate encodings, large enough to amortize the call.
_BATCH = 4096
_PLAIN = re.compile("[A-Za-z0-9]")


@dataclass(frozen=True)
class Encoded:
    """One row as the encoder reads it."""

    ids: npt.NDArray[np.int32]
    """(T,) token ids with [CLS] and [SEP]."""
    segments: npt.NDArray[np.int8]
    """(T,) 0 for [CLS] A [SEP], 1 for B [SEP]."""


def read_as_text(tokenizer: Tokenizer) -> None:
    """Let a tokenizer take special tokens in a text, such as "[SEP]", as text."""
    # Set once: tokenizers before 0.23 refuse to set anything while another thread tokenizes, as one of a server may.
    if not tokenizer.encode_special_tokens:
        tokenizer.encode_special_tokens = True


def encode_examples(tokenizer: Tokenizer, vocabulary: Vocabulary, examples: Sequence[Example], length: int) -> list[Encoded]:
    """Tokenize rows and cut each to the length, the longer of a pair first.

    Args:
        tokenizer: a tokenizer without truncation or padding; its special-token template is not used, and it is
            left taking special tokens in a text as text.
        vocabulary: gives the ids of [CLS] and [SEP].
        examples: single texts and pairs, also mixed.
        length: most tokens of a row, special tokens included.

    Returns:
        One value a row, in order, without padding.
    """
    assert length >= 3, length
    read_as_text(tokenizer)
    encoded: list[Encoded] = []
    for first in range(0, len(examples), _BATCH):
        part = examples[first : first + _BATCH]
        # Each text once, however many rows it is in.
        texts = list(dict.fromkeys(text for example in part for text in (example.text_a, example.text_b) if text is not None))
        tokens = {text: e.ids for text, e in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True)}
        for example in part:
            b = None if example.text_b is None else tokens[example.text_b]
            encoded.append(join(tokens[example.text_a], b, vocabulary.cls, vocabulary.sep, length))
    return encoded


def without_tokens(tokenizer: Tokenizer, examples: Sequence[Example]) -> list[int]:
    """Return the places of rows of which the tokenizer leaves nothing: empty ones, and those of characters that it drops, such as control characters."""
    # A letter or a digit of ASCII is always a token or part of one.
    texts = {place: f"{example.text_a} {example.text_b or ''}" for place, example in enumerate(examples)}
    doubtful = {place: text for place, text in texts.items() if not _PLAIN.search(text)}
    if not doubtful:
        return []
    encodings = tokenizer.encode_batch_fast(list(doubtful.values()), add_special_tokens=False)
    return [place for place, encoding in zip(doubtful, encodings, strict=True) if not encoding.ids]


def with_tokens(tokenizer: Tokenizer, task: TaskData) -> TaskData:
    """Return a task without the training rows that have no token; its notes name them, and those that are scored or answered all the same.

    Raises:
        DataError: no training row has a token.
    """
    notes = list(task.notes)
    train = task.train
    if empty := without_tokens(tokenizer, train):
        # Rows that belong together go together.
        groups = {place // task.rows_together for place in empty}
        train = [row for place, row in enumerate(train) if place // task.rows_together not in groups]
        notes.append(f"{_without(empty, task.train, 'training')}: not trained on")
        if not train:
            raise DataError(f"{notes[-1]}; the tokenizer of this run knows none of their characters")
    for name, rows in {"dev": task.dev, "test": task.test, **task.extra}.items():
        if empty := without_tokens(tokenizer, rows):
            notes.append(f"{_without(empty, rows, name)}: answered as an empty text")
    return replace(task, train=train, notes=tuple(notes))


def _without(empty: Sequence[int], rows: Sequence[Example], name: str) -> str:
    first = ", ".join(repr(rows[place].id) for place in empty[:5])
    return f"{len(empty):,} of {len(rows):,} {name} rows have no token (ids {first}{', ...' if len(empty) > 5 else ''})"


def join(a: Sequence[int], b: Sequence[int] | None, cls: int, sep: int, length: int) -> Encoded:
    """Put [CLS] and [SEP] around one text or a pair, cut to the length.

    Args:
        a, b: token ids without special tokens; b is None for a single text.
        cls, sep: ids of [CLS] and [SEP].
        length: most tokens of the result.
    """
    if b is None:
        kept = a[: length - 2]
        ids = np.array([cls, *kept, sep], dtype=np.int32)
        return Encoded(ids, np.zeros(len(ids), dtype=np.int8))
    length_a, length_b = truncated(len(a), len(b), length - 3)
    ids = np.array([cls, *a[:length_a], sep, *b[:length_b], sep], dtype=np.int32)
    segments = np.zeros(len(ids), dtype=np.int8)
    segments[length_a + 2 :] = 1
    return Encoded(ids, segments)


def truncated(length_a: int, length_b: int, max_tokens: int) -> tuple[int, int]:
    """Return lengths of a pair after cutting the longer one token at a time, the second at equality.

    This is `_truncate_seq_pair` of google-research/bert (run_classifier.py) in closed form.

    Args:
        length_a, length_b: tokens of the two texts.
        max_tokens: most tokens of both together.
    """
    if length_a + length_b <= max_tokens:
        return length_a, length_b
    kept_a = min(length_a, max(max_tokens - length_b, (max_tokens + 1) // 2))
    return kept_a, max_tokens - kept_a
