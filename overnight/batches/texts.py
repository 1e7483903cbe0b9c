"""The tokens of the sequences of a batch, one after another: copied from their shards for all sequences at once, since of a sequence there is little to copy.

Shapes: N tokens, S sequences, R runs of tokens, T tokens of all runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overnight.batches import matching, pairs
from overnight.corpus.tokenizer import Vocabulary


def sequences(
    corpora: Sequence[np.ndarray], numbers_S: np.ndarray, rows_S: np.ndarray, starts: np.ndarray, keys_S: np.ndarray, vocabulary: Vocabulary
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of some sequences (int64 [N]) and the segment of each (int64 [N]), before anything is masked.

    Args:
        corpora: tokens of each shard.
        numbers_S: shard of each sequence.
        rows_S: plan row of each (S, 5).
        starts: offset of each sequence, and the end (S + 1).
        keys_S: uint64, of each sequence: what the second text of a pair for token matching is drawn by.
    """
    first_S, second_S = rows_S[:, pairs.A_END] - rows_S[:, pairs.A_START], rows_S[:, pairs.B_END] - rows_S[:, pairs.B_START]
    splits_S, ends_S = starts[:-1] + 1 + first_S, starts[1:] - 1
    ids_N, segments_N = np.empty(starts[-1], np.int64), np.zeros(starts[-1], np.int64)
    ids_N[starts[:-1]], ids_N[splits_S], ids_N[ends_S] = vocabulary.cls, vocabulary.sep, vocabulary.sep
    copy_runs(corpora, numbers_S, rows_S[:, pairs.A_START], first_S, ids_N, starts[:-1] + 1)
    with_second = np.flatnonzero(second_S > 0)
    if not len(with_second):
        return ids_N, segments_N
    segments_N[runs(splits_S[with_second] + 1, (ends_S - splits_S)[with_second])] = 1
    matched = matching.is_matching(rows_S)[with_second]
    plain, matched = with_second[~matched], with_second[matched]
    copy_runs(corpora, numbers_S[plain], rows_S[plain, pairs.B_START], second_S[plain], ids_N, splits_S[plain] + 1)
    if len(matched):
        sizes = np.array([len(tokens) for tokens in corpora])[numbers_S[matched]]
        kept_T, corrupted, places, of = matching.second_texts(first_S[matched], second_S[matched], keys_S[matched], sizes)
        here_T = runs(splits_S[matched] + 1, second_S[matched])
        ids_N[here_T] = ids_N[np.repeat(starts[matched] + 1, second_S[matched]) + kept_T]
        copy_runs(corpora, numbers_S[matched][of], places, np.ones(len(places), np.int64), ids_N, here_T[corrupted])
    return ids_N, segments_N


def runs(begins_R: np.ndarray, counts_R: np.ndarray) -> np.ndarray:
    """Return the numbers begin, begin + 1, ... of each run, so many as it counts, one run after another (T)."""
    ends_R = np.cumsum(counts_R)
    return np.arange(ends_R[-1] if len(ends_R) else 0) + np.repeat(begins_R - (ends_R - counts_R), counts_R)


def copy_runs(
    corpora: Sequence[np.ndarray], numbers_R: np.ndarray, begins_R: np.ndarray, counts_R: np.ndarray, out: np.ndarray, places_R: np.ndarray
) -> None:
    """Copy runs of tokens to where they belong.

    Args:
        corpora: tokens of each shard.
        numbers_R: shard of each run.
        begins_R: first token of each in its shard.
        counts_R: tokens of each.
        out: written to.
        places_R: where each begins in it.
    """
    by_shard = np.argsort(numbers_R, kind="stable")
    counts_R = counts_R[by_shard]
    from_T, to_T = runs(begins_R[by_shard], counts_R), runs(places_R[by_shard], counts_R)
    shards, first_R = np.unique(numbers_R[by_shard], return_index=True)
    ends_T = np.cumsum(np.add.reduceat(counts_R, first_R)) if len(shards) else []
    begin = 0
    for shard, end in zip(shards.tolist(), map(int, ends_T), strict=True):
        out[to_T[begin:end]] = corpora[shard][from_T[begin:end]]
        begin = end
