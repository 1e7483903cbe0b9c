"""How long the sequences of a phase are, about, before any is drawn: what plans, budgets and trials go by.

Texts that end early make them a little shorter still, the more of them the longer a sequence is: of 512 tokens of Wikipedia a tenth is missing.
"""

from __future__ import annotations

from typing import NamedTuple

from overnight.config import BertPhase, Phase

# Of a length of 1: the mean of a length that is drawn up to it, and of its square. A pair for token matching is half as long again, and at most 1.
_DRAWN, _DRAWN_PAIR = (1 / 2, 1 / 3), (2 / 3, 5 / 9)
# Half of the sentence that a length ends in (tokens): such a one, which is more often a long one, has 39 in books and 44 in Wikipedia. One that is longer than
# a length is cut, so that short lengths lose less: a quarter at most.
_HALF_SENTENCE, _MOST_OFF = 20, 1 / 4


class Lengths(NamedTuple):
    """Of the sequences of a phase."""

    mean: float
    """Tokens."""
    square: float
    """Mean of the squares, as attention goes."""


def expected_lengths(phase: Phase, pairs: bool = False) -> Lengths:
    """Return how long the sequences of a phase are, about.

    Args:
        pairs: those that are pairs for token matching (`overnight.batches.matching.with_matching`).
    """
    if not isinstance(phase, BertPhase):
        return Lengths(phase.seq_len, phase.seq_len**2)
    short, full, (mean, square) = phase.short_seq_prob, phase.seq_len, _DRAWN_PAIR if pairs else _DRAWN
    if phase.whole_sentences and not pairs:  # of the short ones many are a single sentence, which is longer than they were to be
        full -= min(_HALF_SENTENCE, _MOST_OFF * full)
    if phase.nsp:  # the short ones end with a sentence, and half of them with another one, of a random B
        more = min(1.0, 1.5 * _HALF_SENTENCE / phase.seq_len)
        mean, square = mean + more - more**2 / 2, (1 - more**3) / 3 + more
    return Lengths(short * phase.seq_len * mean + (1 - short) * full, short * phase.seq_len**2 * square + (1 - short) * full**2)
