"""Bits per character and masked accuracy of a text: two numbers of one pass, with masks at 15 % for every model.

Shapes: N tokens of a flat batch, S sequences, M predicted positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from overnight.batches import masking
from overnight.batches.order import key, mix
from overnight.batches.packing import Batch
from overnight.console import Line
from overnight.display import share
from overnight.evaluation.masked_lm import MaskedLM, flat_batch
from overnight.evaluation.texts import NothingToPredictError, Text

RATE, SEQ_LEN = 0.15, 128
"""Share of tokens that are predicted, and tokens of a sequence at most where nothing else is asked for, whatever a model was trained with."""
# The same masks for a text every time; no run has so many counters.
_SEED = 0x15


@dataclass(frozen=True)
class MaskedScore:
    """How well a model fills in the masked tokens of a text."""

    bits_per_character: float
    """Nats of all masked tokens, over the characters that they cover and ln 2."""
    masked_accuracy: float
    """Share of masked tokens whose likeliest is the right one (0 to 1)."""
    mlm_loss: float
    """Nats a masked token; not comparable across vocabularies."""
    characters: int
    """Of the whole text."""
    tokens: int
    """Of the whole text, without special ones."""
    masked_tokens: int
    masked_characters: int
    unknown: float
    """Share of the characters that are [UNK] to the model (0 to 1); they are cheap to guess, so a large share makes the bits too few."""


@dataclass(frozen=True)
class _Sequences:
    """A text cut into sequences of nearly equal length, without special tokens."""

    ids: list[np.ndarray]
    covered: list[np.ndarray]
    """Characters of each token."""


def covered_characters(ends: np.ndarray, length: int) -> np.ndarray:
    """Return how many characters of a text each of its tokens covers; they sum to its length.

    What lies before a token and belongs to none, mostly a space, is covered by it; what follows the last one, by the last one. Of tokens
    that share a character, as the bytes of one do, the first covers it.

    Args:
        ends: int [N], one or more; where each token ends in the text.
        length: of the text.
    """
    ends = np.maximum.accumulate(ends)
    ends[-1] = length
    return np.diff(ends, prepend=0)


def masked_score(model: MaskedLM, text: Text, line: Line, seq_len: int = SEQ_LEN) -> MaskedScore:
    """Mask 15 % of the tokens of each sequence (80 % [MASK], 10 % random, 10 % kept), and predict them.

    Args:
        model: any.
        text: the passages.
        line: where progress is shown.
        seq_len: longest sequence (tokens, with [CLS] and [SEP]); no longer than the model has positions for.

    Raises:
        NothingToPredictError: when no token is made of the text, or it is too short.
    """
    sequences = _sequences(model, text, min(seq_len, model.longest))
    unknown = sum(int(covered[ids == model.vocabulary.unk].sum()) for ids, covered in zip(sequences.ids, sequences.covered, strict=True))
    nats, right, count, characters, done = 0.0, 0, 0, 0, 0
    for batch, covered_M, size in _batches(model, sequences):
        log_p, is_right = model.log_probabilities(batch)
        nats -= float(log_p.sum(dtype=np.float64))
        right, count, characters, done = right + int(is_right.sum()), count + len(log_p), characters + int(covered_M.sum()), done + size
        line.update(f"bits per character of {text.name}: {share(done / len(sequences.ids))} of the text")
    if not characters:  # such as a text of one letter that is several bytes
        raise NothingToPredictError(f"{text.name}: is too short to mask a character of it", "name a longer text with --text")
    return MaskedScore(
        bits_per_character=nats / characters / math.log(2),
        masked_accuracy=right / count,
        mlm_loss=nats / count,
        characters=text.characters,
        tokens=sum(map(len, sequences.ids)),
        masked_tokens=count,
        masked_characters=characters,
        unknown=unknown / text.characters,
    )


def _sequences(model: MaskedLM, text: Text, seq_len: int) -> _Sequences:
    longest, ids, covered = seq_len - 2, [], []
    for passage, encoding in zip(text.passages, model.tokenizer.encode_batch(text.passages, add_special_tokens=False), strict=True):
        if not encoding.ids:
            continue
        parts = -(-len(encoding.ids) // longest)
        ids += np.array_split(np.array(encoding.ids, np.int64), parts)
        ends = np.array([end for _, end in encoding.offsets], np.int64)
        covered += np.array_split(covered_characters(ends, len(passage)), parts)
    if not ids:
        raise NothingToPredictError(f"{text.name}: the tokenizer of {model.name} makes no token of it")
    return _Sequences(ids, covered)


def _batches(model: MaskedLM, sequences: _Sequences) -> Iterator[tuple[Batch, np.ndarray, int]]:
    """Yield masked batches of sequences, longest first, the characters of their predicted tokens (M), and how many sequences."""
    vocabulary = model.vocabulary
    lengths = np.array([len(ids) + 2 for ids in sequences.ids])
    keys = mix(np.uint64(key(_SEED)) ^ np.arange(len(lengths), dtype=np.uint64))
    longest_first = np.argsort(-lengths, kind="stable")
    for rows in grouped_by_tokens(lengths[longest_first], model.batch_tokens):
        chosen = longest_first[rows]
        ids_N = np.concatenate([[vocabulary.cls, *sequences.ids[row], vocabulary.sep] for row in chosen])
        covered_N = np.concatenate([[0, *sequences.covered[row], 0] for row in chosen])
        starts = np.concatenate([[0], np.cumsum(lengths[chosen])])
        counts = masking.predictions(lengths[chosen], RATE, 0)
        masked_N, predicted_M, labels_M = masking.mask(ids_N, starts, keys[chosen], counts, vocabulary, whole_word=False)
        yield flat_batch(masked_N, lengths[chosen], predicted_M, labels_M), covered_N[predicted_M], len(chosen)


def grouped_by_tokens(lengths: Sequence[int] | np.ndarray, most: int) -> Iterator[slice]:
    """Yield consecutive sequences that together have at most so many tokens, one at least."""
    start = total = 0
    for at, length in enumerate(lengths):
        if at > start and total + length > most:
            yield slice(start, at)
            start, total = at, 0
        total += length
    if len(lengths):
        yield slice(start, len(lengths))
