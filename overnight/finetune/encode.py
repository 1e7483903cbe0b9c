"""Rows to token ids: [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

Shapes: T tokens of one row, special tokens included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from overnight.tasks.examples import Example

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from overnight.corpus.tokenizer import Vocabulary

# Rows tokenized at once: bounds the memory of the intermediate encodings, large enough to amortize the call.
_BATCH = 4096


@dataclass(frozen=True)
class Encoded:
    """One row as the encoder reads it."""

    ids: npt.NDArray[np.int32]
    """(T,) token ids with [CLS] and [SEP]."""
    segments: npt.NDArray[np.int8]
    """(T,) 0 for [CLS] A [SEP], 1 for B [SEP]."""


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
    tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
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
