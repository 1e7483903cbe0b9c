"""Which tokens are predicted and what stands in their place, by counters: the same wherever the sample is made.

Shapes: N tokens of the flat batch, M predicted positions, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from overnight.batches.order import NEVER, random_words
from overnight.corpus.tokenizer import Vocabulary

# A word hash above this share of 2^64 is kept or replaced at random: 80 % [MASK], 10 % random, 10 % kept.
_MASKED, _RANDOM = 0.8, 0.9


def predictions(lengths_S: np.ndarray, rate: float, most: int) -> np.ndarray:
    """Return how many tokens of each sequence are predicted: the rounded share, at least 1, at most `most` (0: no bound).

    Args:
        lengths_S: tokens of each sequence, with [CLS] and [SEP].
    """
    return np.clip(np.rint(lengths_S * rate).astype(np.int64), 1, most or None)


def next_tokens(ids_N: np.ndarray, starts_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets at which the next token of the sequence is predicted, all but the last of each, in increasing order (M), and the next tokens (M).

    Args:
        ids_N, starts_S: as in :func:`mask`.
    """
    predicted_M = np.delete(np.arange(len(ids_N)), starts_S[1:] - 1)
    return predicted_M, ids_N[predicted_M + 1]


def falling_rate(first: float, last: float, decay: Callable[[int], float]) -> Callable[[int], float]:
    """Return the share of tokens to predict as a function of the step: from the first to the last as a decay falls from 1 to 0."""
    return lambda step: last + (first - last) * decay(step)


def mask(
    ids_N: np.ndarray,
    starts_S: np.ndarray,
    keys_S: np.ndarray,
    counts_S: np.ndarray,
    vocabulary: Vocabulary,
    whole_word: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose and replace the predicted tokens of a flat batch.

    Args:
        ids_N: token ids, sequences one after another, each with [CLS] first; not changed.
        starts_S: offset of each sequence, and N at the end (S + 1 entries).
        keys_S: uint64 key of each sample, from (seed, phase, epoch, sample).
        counts_S: how many tokens of each sequence to predict; fewer where it has fewer.
        vocabulary: special ids, continuation tokens.
        whole_word: choose words, of which all tokens are predicted, until the next would exceed the count.

    Returns:
        the changed ids (N), the predicted offsets in increasing order (M), and the true ids there (M).
    """
    lengths = np.diff(starts_S)
    sequence_N = np.repeat(np.arange(len(lengths)), lengths)
    position_N = np.arange(len(ids_N)) - np.repeat(starts_S[:-1], lengths)
    keys_N = np.asarray(keys_S, np.uint64)[sequence_N]
    can_N = (ids_N != vocabulary.cls) & (ids_N != vocabulary.sep)
    if whole_word:
        chosen_M = _choose_words(ids_N, sequence_N, position_N, keys_N, can_N, counts_S, vocabulary)
    else:
        # A row for each sequence: sorting short rows of one array is far faster than sorting all by two keys. No two tokens of one have equal luck.
        luck_N = random_words(keys_N, position_N * 4)
        luck_SL = np.full((len(lengths), int(lengths.max())), NEVER)
        luck_SL[sequence_N[can_N], position_N[can_N]] = luck_N[can_N]
        luck_SL.sort(axis=1)
        most = np.minimum(counts_S, luck_SL.shape[1])
        worst_S = luck_SL[np.arange(len(lengths)), np.maximum(most, 1) - 1]
        chosen_M = np.flatnonzero(can_N & (luck_N <= worst_S[sequence_N]) & (most > 0)[sequence_N])
    labels_M = ids_N[chosen_M].copy()
    ids = ids_N.copy()
    keys_M, position_M = keys_N[chosen_M], position_N[chosen_M]
    fate_M = random_words(keys_M, position_M * 4 + 1).astype(np.float64) * 2.0**-64
    other_M = (random_words(keys_M, position_M * 4 + 2) % np.uint64(vocabulary.size)).astype(ids.dtype)
    ids[chosen_M] = np.where(fate_M < _MASKED, vocabulary.mask, np.where(fate_M < _RANDOM, other_M, labels_M))
    return ids, chosen_M, labels_M


def _choose_words(
    ids_N: np.ndarray,
    sequence_N: np.ndarray,
    position_N: np.ndarray,
    keys_N: np.ndarray,
    can_N: np.ndarray,
    counts_S: np.ndarray,
    vocabulary: Vocabulary,
) -> np.ndarray:
    """Return offsets of the tokens of randomly chosen words: a word that would exceed the count is passed over, as in the original."""
    # A token continues a word only behind another token of it: a segment may begin in the middle of one.
    joins_N = vocabulary.continuation[ids_N] & can_N
    joins_N[1:] &= can_N[:-1]
    first = np.flatnonzero(can_N & ~joins_N)
    # Runs of joined tokens end where the next token does not join.
    ends = np.append(np.flatnonzero(~joins_N), len(ids_N))
    last = ends[np.searchsorted(ends, first, side="right")]
    luck, sequence = random_words(keys_N[first], position_N[first] * 4), sequence_N[first]
    words_S = np.bincount(sequence, minlength=len(counts_S))
    row_W = np.arange(len(first)) - np.repeat(np.cumsum(words_S) - words_S, words_S)
    luck_SW = np.full((len(counts_S), max(1, int(words_S.max()))), NEVER)
    luck_SW[sequence, row_W] = luck
    size_SW = np.full(luck_SW.shape, 1 << 40)
    size_SW[sequence, row_W] = last - first
    by_luck = np.argsort(luck_SW, axis=1, kind="stable")
    # The words of all sequences of one rank at a time, best luck first, until nothing is left to choose.
    budget_S, rows, taken_SW = counts_S.astype(np.int64), np.arange(len(counts_S)), np.zeros(luck_SW.shape, bool)
    for word_S in by_luck.T:
        size_S = size_SW[rows, word_S]
        fits_S = size_S <= budget_S
        budget_S -= size_S * fits_S
        taken_SW[rows, word_S] = fits_S
        if not budget_S.any():
            break
    taken = taken_SW[sequence, row_W]
    edges = np.zeros(len(ids_N) + 1, np.int8)
    edges[first[taken]] += 1
    edges[last[taken]] -= 1
    return np.flatnonzero(np.cumsum(edges[:-1]))


def context_free_loss(train_V: np.ndarray, valid_V: np.ndarray) -> float:
    """Return the masked-LM loss of the best model that sees no context: the plateau on which training stands before attention has learned anything.

    It knows how frequent each token is, and what stands at the place itself: at [MASK] it guesses by frequency, and of another token it knows how
    likely it is to be the true one, kept, and how likely a random one.

    Args:
        train_V: how often each token of the vocabulary occurs in the text it has learned from; each counts once more than it does.
        valid_V: how often in the text that is predicted.

    Returns:
        nats a predicted token, however many are predicted.
    """
    size = len(train_V)
    p_V, share_V = (train_V + 1) / (train_V.sum() + size), valid_V / valid_V.sum()
    unigram = float(-(share_V * np.log(p_V)).sum())
    kept, random = 1 - _RANDOM, _RANDOM - _MASKED
    # Of a visible token s, kept and random are as likely as kept p(s) and random / V.
    seen_V = kept * p_V + random / size
    when_kept = float(-(share_V * np.log((kept * p_V + random * p_V / size) / seen_V)).sum())
    # The last term: one of V random tokens is the true one, by chance.
    when_random = unigram + float(np.log(seen_V * size / random).mean()) - math.log1p(kept * size / random) / size
    return _MASKED * unigram + kept * when_kept + random * when_random
