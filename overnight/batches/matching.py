"""Token matching: examples that teach an encoder to compare two texts.

Without segment embeddings and next-sentence prediction a small encoder does not learn from masked tokens alone to find a token of one text in
another, and tasks with pairs of texts stay near chance. So a share of the sequences becomes a text and a corrupted part of it, and of every token
the network says in which of the two it stands and whether the other one has it too: many labels a sequence, where next-sentence prediction has one.
"""

from __future__ import annotations

import numpy as np

from overnight.batches.batch_size import sequences_before
from overnight.batches.order import NEVER, mix, random_words
from overnight.batches.packing import IGNORED
from overnight.batches.pairs import A_END, A_START, B_END, B_START, IS_RANDOM
from overnight.config import BertPhase, Phase

_CORRUPTED = 0.3
"""Share of the tokens of the second text that are replaced by others of the corpus."""
MATCHING = 2
"""In the column of a plan that says whether B is random."""
_LEAST_PHASE = 4
"""A budget leaves pairs out of a phase that gets fewer than so many times `token_matching_steps`: they would take the time in which masked tokens are learned."""
# The use of a token's counter, behind those of the masks.
_LUCK = 3


def share_of_pairs(phase: BertPhase, step: int) -> float:
    """Return the share of the sequences of a step (from 0) of a phase that become pairs."""
    at_first = not phase.token_matching_steps or step < phase.token_matching_steps
    return phase.token_matching if at_first else min(phase.token_matching, phase.final_token_matching)


def pairs_before(phase: Phase, step: int) -> float:
    """Return about how many of the sequences of all steps of a phase before `step` become pairs."""
    if not isinstance(phase, BertPhase) or not phase.token_matching:
        return 0.0
    first, every = sequences_before(phase, min(step, phase.token_matching_steps or step)), sequences_before(phase, step)
    return share_of_pairs(phase, 0) * first + share_of_pairs(phase, phase.token_matching_steps) * (every - first)


def too_short(phase: BertPhase, steps: int) -> bool:
    """Return whether a phase for which a budget has so many steps leaves its pairs out."""
    return bool(phase.token_matching) and steps < _LEAST_PHASE * phase.token_matching_steps


def with_matching(rows: np.ndarray, keys_S: np.ndarray, share: float, length: int) -> np.ndarray:
    """Return the plan rows (S, 5) of single segments, of which a share has become a text and a part of it, half as long.

    Args:
        rows: of :func:`overnight.batches.pairs.plan_segments`.
        keys_S: uint64 key of each sample.
        share: of the sequences (0 to 1).
        length: longest example (tokens, with [CLS] and two [SEP]).
    """
    chosen = (keys_S.astype(np.float64) * 2.0**-64 < share) & (rows[:, A_END] - rows[:, A_START] > 1)
    out = rows.copy()
    # A pair of the longest segment is as long as that, so that most batches keep their size.
    first = np.minimum(rows[chosen, A_END] - rows[chosen, A_START], length - 3 - (length - 3) // 3)
    second = np.minimum(first // 2, length - 3 - first)
    out[chosen, A_END] = rows[chosen, A_START] + first
    out[chosen, B_START] = rows[chosen, A_START]
    out[chosen, B_END] = rows[chosen, A_START] + second
    out[chosen, IS_RANDOM] = MATCHING
    return out


def is_matching(rows: np.ndarray) -> np.ndarray:
    """Return which plan rows are pairs of a text and a part of it (bool [S])."""
    return np.asarray(rows[:, IS_RANDOM] == MATCHING)


def second_texts(
    first_P: np.ndarray, counts_P: np.ndarray, keys_P: np.ndarray, sizes_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return what the second texts of P pairs are made of, T tokens one text after another: so many of the first text, in their order, some replaced by any of a corpus.

    Args:
        first_P: tokens of each first text.
        counts_P: tokens of each second text, one at least and no more than the first has.
        keys_P: uint64 key of each.
        sizes_P: tokens of the corpus of each.

    Returns:
        the place of each token in its first text (T); which tokens are replaced (offsets, C); by which token of the corpus (C), each as often as it occurs
        there; and of which pair these are (C).
    """
    # The tokens with the best luck are kept, of which no two of a text are equal; a row for each text, as in `masking.mask`.
    place_L = np.arange(first_P.max())
    luck_PL = random_words(keys_P[:, None], place_L * 4 + _LUCK)
    outside_PL = place_L >= first_P[:, None]
    luck_PL[outside_PL] = NEVER
    worst_P = np.sort(luck_PL, axis=1)[np.arange(len(first_P)), counts_P - 1]
    kept_T = np.nonzero((luck_PL <= worst_P[:, None]) & ~outside_PL)[1]
    pair_T = np.repeat(np.arange(len(counts_P)), counts_P)
    own_T, number_T = mix(keys_P)[pair_T], np.arange(len(pair_T)) - np.repeat(np.cumsum(counts_P) - counts_P, counts_P)
    corrupted = np.flatnonzero(random_words(own_T, number_T * 2).astype(np.float64) * 2.0**-64 < _CORRUPTED)
    of = pair_T[corrupted]
    places = random_words(own_T[corrupted], number_T[corrupted] * 2 + 1) % sizes_P[of].astype(np.uint64)
    return kept_T, corrupted, places.astype(np.int64), of


def match_labels(
    ids_N: np.ndarray, segments_N: np.ndarray, lengths_S: np.ndarray, matching_S: np.ndarray, special_V: np.ndarray
) -> np.ndarray:
    """Return the label of each token (int64 [N]), one of `MATCH_CLASSES` of :mod:`overnight.batches.packing`; -100 outside of such pairs and for special tokens.

    Args:
        ids_N: tokens as the network sees them: what is masked or replaced by masking counts as what stands there.
        segments_N: 0 or 1.
        lengths_S: tokens of each sequence.
        matching_S: of :func:`is_matching`.
        special_V: which tokens are special.
    """
    labels = np.full(len(ids_N), IGNORED, np.int64)
    sequence_N = np.repeat(np.arange(len(lengths_S)), lengths_S)
    taken = np.flatnonzero(matching_S[sequence_N] & ~special_V[ids_N])
    if not len(taken):
        return labels
    # Equal tokens of a sequence lie side by side, those of its first text before those of its second.
    token, segment = sequence_N[taken] * len(special_V) + ids_N[taken], segments_N[taken]
    order = np.argsort(2 * token + segment)
    token, segment = token[order], segment[order]
    first = np.flatnonzero(np.diff(token, prepend=-1))
    counts = np.diff(first, append=len(token))
    both = (segment[first] == 0) & (segment[first + counts - 1] == 1)
    labels[taken[order]] = 2 * segment + np.repeat(both, counts)
    return labels
