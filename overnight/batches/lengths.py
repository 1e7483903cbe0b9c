"""How long the sequences of a phase are, about, before any is drawn: what plans, budgets and trials go by.

Texts that end early and `whole_sentences` make them a little shorter: 62 tokens on average where this says 64. The short ones of next-sentence
prediction, of which recipes have a tenth, are longer: they aim at a length and end with the sentence.
"""

from __future__ import annotations

from typing import NamedTuple

from overnight.config import BertPhase, Phase

# Of a length of 1: the mean of a length that is drawn up to it, and of its square. A pair for token matching is half as long again, and at most 1.
_DRAWN, _DRAWN_PAIR = (1 / 2, 1 / 3), (2 / 3, 5 / 9)


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
    short = phase.short_seq_prob if isinstance(phase, BertPhase) else 0.0
    mean, square = _DRAWN_PAIR if pairs else _DRAWN
    return Lengths(phase.seq_len * (1 - short * (1 - mean)), phase.seq_len**2 * (1 - short * (1 - square)))
