"""Bits per character of whole words: what compares models of different vocabularies.

15 % of the words are hidden, the same for every model, each behind as many [MASK] as it has tokens. A word is guessed token by token, from left to right
(Kauf and Ivanova 2023, arXiv 2305.10588): the model is told a word's tokens before the next one is asked for, so that the product of their probabilities is
that of the word. All words of a sequence are guessed at once: one by one, the first tokens of the others would not be told, which changes nothing that counts
and takes as many readings as there are tokens of split words. What the number of [MASK] gives away, how many tokens the word has, is paid for by the
frequencies of those numbers. So the sum is what it takes to write the hidden words down, whatever they are split into.

Shapes: T tokens of a passage or a sequence, W words of a passage, N tokens of a flat batch, M predicted positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from overnight.batches.order import key, mix
from overnight.console import Line
from overnight.display import share
from overnight.evaluation.masked import RATE, SEQ_LEN, grouped_by_tokens
from overnight.evaluation.masked_lm import MaskedLM, flat_batch
from overnight.evaluation.texts import Text
from overnight.tasks.words import word_pattern

# Of the passages, since each is read as often as its longest hidden word has tokens.
_EVERY = 4
# Of a hidden word (characters): an address of the web would be read as often as it has tokens.
_LONGEST_WORD = 30
# The same words of a text every time.
_SEED = 0x77


@dataclass(frozen=True)
class WordScore:
    """How well a model guesses hidden words."""

    word_bits_per_character: float
    """Bits to write the hidden words down, over their characters, each with the space before it."""
    word_standard_error: float | None
    """Of that, by how much passages differ; None of a single one."""
    split_bits_per_character: float
    """The part of them that tells how many tokens each word has."""
    hidden_words: int


@dataclass(frozen=True)
class _Words:
    """The words of a passage, as far as tokens tell them apart."""

    starts: np.ndarray
    """int [W + 1]: their first tokens."""
    characters: np.ndarray
    """int [W], the space before each included."""
    hidden: np.ndarray
    """bool [W]."""

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each, int [W]."""
        return np.diff(self.starts)


@dataclass(frozen=True)
class _Sequence:
    """Consecutive words of a passage, between [CLS] and [SEP]."""

    passage: int
    ids: np.ndarray
    """int [T]."""
    part: np.ndarray
    """int [T]: which token of its hidden word each is, -1 where it can be seen."""
    size: np.ndarray
    """int [T]: tokens of that word, 0 where it can be seen."""


def word_score(model: MaskedLM, text: Text, line: Line, seq_len: int = SEQ_LEN) -> WordScore | None:
    """Hide 15 % of the words of every fourth passage, and guess them; None where there is none to hide.

    Args:
        model: any.
        text: the passages.
        line: where progress is shown.
        seq_len: longest sequence (tokens, with [CLS] and [SEP]); no longer than the model has positions for.
    """
    passages = text.passages[::_EVERY]
    longest = min(seq_len, model.longest) - 2
    words, sequences = list[_Words](), list[_Sequence]()
    for number, encoding in enumerate(model.tokenizer.encode_batch(passages, add_special_tokens=False)):
        words.append(_words(passages[number], number, np.array(encoding.offsets, np.int64).reshape(-1, 2), longest))
        sequences += _sequences(model, number, np.array(encoding.ids, np.int64), words[-1], longest)
    characters = np.array([each.characters[each.hidden].sum() for each in words])
    if not characters.any():
        return None
    frequencies = np.bincount(np.concatenate([each.sizes for each in words]))
    nats = np.array([-np.log(frequencies[each.sizes[each.hidden]] / frequencies.sum()).sum() for each in words])
    split = float(nats.sum() / math.log(2) / characters.sum())
    lengths, done = np.array([len(each.ids) for each in sequences]), 0
    for rows in grouped_by_tokens(lengths, model.batch_tokens):
        for passage_M, log_p_M in _guesses(model, sequences[rows]):
            np.subtract.at(nats, passage_M, log_p_M.astype(np.float64))
        done += len(sequences[rows])
        line.update(f"bits per character of whole words of {text.name}: {share(done / len(sequences))} of the text")
    return WordScore(*_ratio(nats / math.log(2), characters), split, hidden_words=sum(int(each.hidden.sum()) for each in words))


def _words(passage: str, number: int, offsets: np.ndarray, longest: int) -> _Words:
    """Return the words of a passage: those that a token reaches into together are one.

    Args:
        passage: the text.
        number: which of a text, from which follows what is hidden.
        offsets: int [T, 2]; start and end of each token (characters).
        longest: most tokens of a sequence; a word of more is not hidden.
    """
    spans = np.array([match.span() for match in _unit_pattern().finditer(passage)], np.int64).reshape(-1, 2)
    if not len(spans) or not len(offsets):
        return _Words(np.array([0, len(offsets)]), np.zeros(1, np.int64), np.zeros(1, bool))
    # The word whose end is the first behind a token's start, and the one whose start is the last before its end; of a token of mere spaces the next one.
    first = np.minimum(np.searchsorted(spans[:, 1], offsets[:, 0], side="right"), len(spans) - 1)
    last = np.maximum.accumulate(np.maximum(first, np.searchsorted(spans[:, 0], offsets[:, 1], side="left") - 1))
    begins = np.flatnonzero(np.append(True, first[1:] > last[:-1])[: len(first)])
    starts, ends = np.append(begins, len(first)), np.append(begins[1:], len(first)) - 1
    first, last = first[begins], last[ends]
    before = np.where(first > 0, spans[first - 1, 1], 0)
    luck = mix(np.uint64(key(_SEED, number)) ^ first.astype(np.uint64)) >> np.uint64(11)
    fits = (spans[last, 1] - spans[first, 0] <= _LONGEST_WORD) & (np.diff(starts) <= longest)
    return _Words(starts, spans[last, 1] - before, fits & (luck < RATE * 2.0**53))


@cache
def _unit_pattern() -> re.Pattern[str]:
    r"""Return what matches a word, or a sign that belongs to none."""
    return re.compile(rf"{word_pattern().pattern}|\S")


def _sequences(model: MaskedLM, passage: int, ids: np.ndarray, words: _Words, longest: int) -> Iterator[_Sequence]:
    """Yield a passage cut into sequences of nearly equal length, between words where it can be; those without a hidden word are left out."""
    sizes = words.sizes
    part = np.where(np.repeat(words.hidden, sizes), np.arange(len(ids)) - np.repeat(words.starts[:-1], sizes), -1)
    size = np.repeat(np.where(words.hidden, sizes, 0), sizes)
    start = 0
    while start < len(ids):
        left = len(ids) - start
        end = start + -(-left // -(-left // longest))
        if end < len(ids):
            between = int(words.starts[np.searchsorted(words.starts, end, side="right") - 1])
            first_ends = int(words.starts[np.searchsorted(words.starts, start, side="right")])
            end = between if between > start else min(first_ends, start + longest)
        if size[start:end].any():
            around = [model.vocabulary.cls, *ids[start:end], model.vocabulary.sep]
            yield _Sequence(
                passage, np.array(around, np.int64), *(np.pad(x[start:end], 1, constant_values=c) for x, c in ((part, -1), (size, 0)))
            )
        start = end


def _guesses(model: MaskedLM, sequences: Sequence[_Sequence]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the passages of predicted tokens (M) and ln p of them (M): first tokens of hidden words, then second ones, and so on."""
    for told in range(max(int(each.size.max()) for each in sequences)):
        here = [each for each in sequences if (each.part == told).any()]
        ids_N, part_N, size_N = (np.concatenate([getattr(each, name) for each in here]) for name in ("ids", "part", "size"))
        lengths = np.array([len(each.ids) for each in here])
        predicted_M = np.flatnonzero(part_N == told)
        masked_N = np.where((part_N >= told) | (part_N >= 0) & (size_N <= told), model.vocabulary.mask, ids_N)
        log_p_M, _ = model.log_probabilities(flat_batch(masked_N, lengths, predicted_M, ids_N[predicted_M]))
        yield np.repeat([each.passage for each in here], lengths)[predicted_M], log_p_M


def _ratio(bits: np.ndarray, characters: np.ndarray) -> tuple[float, float | None]:
    """Return bits per character of all passages, and its standard error, None of a single one."""
    ratio, passages = float(bits.sum() / characters.sum()), int((characters > 0).sum())
    if passages < 2:
        return ratio, None
    squares = float(((bits - ratio * characters) ** 2).sum())
    return ratio, math.sqrt(squares * passages / (passages - 1)) / float(characters.sum())
