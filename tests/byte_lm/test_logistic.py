"""The regression finds what is there, at the strength that validation says, and a unit's threshold is the best there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.byte_lm.logistic import BINS, STRENGTHS, Classifier, Labels, best_unit, by_newton, fit, histogram, threshold
from overnight.byte_lm.ngrams import ngram_counts, tf_idf
from overnight.errors import UserError

pytest.importorskip("sklearn")


def planted(rows: int, width: int, classes: int = 2, seed: int = 0) -> tuple[np.ndarray, Labels]:
    """Noise, in which feature 3 (and 4, 5, ... for more classes) knows the class."""
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, classes, rows)
    features = chance.normal(0, 1, (rows, width)).astype(np.float32)
    for one in range(1, classes):
        features[:, 2 + one] += 3 * (labels == one)
    return features, labels


def test_the_published_grid_is_2_to_the_minus_8_to_1() -> None:
    assert tuple(2.0**k for k in range(-8, 1)) == STRENGTHS and len(STRENGTHS) == 9


def test_the_planted_unit_is_found_and_most_weights_are_zero() -> None:
    train, valid, test = (planted(n, 40, seed=s) for n, s in ((600, 1), (200, 2), (2000, 3)))
    found = fit(train, valid, 2)
    assert best_unit(found) == 3
    assert found.used < 20
    assert found.accuracy(*test) == pytest.approx(0.93, abs=0.02)  # of N(0, 1) and N(3, 1) Bayes is right in 93.3 %
    assert found.valid == found.accuracy(*valid)


def test_the_strength_is_the_one_that_is_right_most_often_on_validation_rows() -> None:
    from sklearn.linear_model import LogisticRegression

    train, valid = planted(200, 60, seed=4), planted(100, 60, seed=5)
    found = fit(train, valid, 2)
    scores = []
    kind = {"penalty": "l1"} if LogisticRegression().penalty == "l2" else {"l1_ratio": 1.0}
    for strength in STRENGTHS:
        peer = LogisticRegression(C=strength, solver="liblinear", max_iter=10_000, tol=1e-7, **kind).fit(train[0].astype(float), train[1])
        scores.append(peer.score(valid[0].astype(float), valid[1]))
        if strength == found.strength:
            np.testing.assert_allclose(found.weights_KF, peer.coef_, atol=1e-3)
    assert found.strength == STRENGTHS[int(np.argmax(scores))]


def test_of_strengths_that_are_right_equally_often_the_smallest_is_taken() -> None:
    features, labels = planted(200, 5, seed=7)
    features[:, 3] += 100 * labels - 50
    found = fit((features, labels), (features, labels), 2)
    assert found.valid == 1.0 and found.strength == STRENGTHS[0]


def far(found: Classifier, features: np.ndarray, labels: Labels) -> float:
    """How far a fit is from an optimum of |w| + C sum loss, in penalties of a weight."""
    w = np.append(found.weights_KF[0], found.bias_K[0])
    x = np.hstack([features.astype(float), np.ones((len(features), 1))])
    gradient = found.strength * (x.T @ (1 / (1 + np.exp(-x @ w)) - labels))
    # At an optimum -sign(w) where w is not 0, between -1 and 1 elsewhere.
    return float(np.where(w != 0, np.abs(gradient + np.sign(w)), np.abs(gradient) - 1).max())


NOISE = np.random.default_rng(8).normal(0, 1, (300, 10))
DENSE = {
    "independent": planted(300, 10, seed=6)[0],
    "the same": np.hstack([NOISE, NOISE, NOISE[:, :3]]),
    "nearly the same": np.hstack([NOISE, NOISE + 1e-9 * np.random.default_rng(9).normal(0, 1, NOISE.shape)]),
    "of every size": NOISE * 10.0 ** np.arange(-5, 5),
    "constant": np.hstack([NOISE, np.zeros((300, 2)), np.ones((300, 2))]),
    "of rank 5": NOISE[:, :5] @ np.random.default_rng(9).normal(0, 1, (5, 100)),
    "more than the rows": np.random.default_rng(9).normal(0, 50, (300, 400)),
    "those of a network": np.tanh(3 * NOISE @ np.random.default_rng(9).normal(0, 1, (10, 300))),
}


@pytest.mark.parametrize("what", list(DENSE))
def test_dense_features_are_fitted_to_the_optimum_whatever_they_are(what: str) -> None:
    features = DENSE[what].astype(np.float32)
    labels = (features[:, 0] / features[:, 0].std() + np.random.default_rng(7).normal(0, 1, 300) > 0).astype(np.int64)
    for strength, weights in zip(STRENGTHS, by_newton(features.astype(float), labels == 1), strict=True):
        assert far(Classifier(strength, weights[None, :-1], weights[-1:], 0.0), features, labels) <= 1.1e-3


def test_sparse_features_are_fitted_near_the_optimum() -> None:
    from scipy.sparse import csr_matrix

    features, labels = planted(300, 10, seed=6)
    features[np.abs(features) < 0.5] = 0
    found = fit((csr_matrix(features), labels), (csr_matrix(features), labels), 2)
    assert far(found, features, labels) <= 0.02
    dense = fit((features, labels), (features, labels), 2)
    assert found.strength == dense.strength
    np.testing.assert_allclose(found.weights_KF, dense.weights_KF, atol=0.01)


def test_more_than_two_classes_are_one_against_the_rest() -> None:
    train, valid, test = (planted(n, 12, 3, s) for n, s in ((900, 1), (300, 2), (1000, 3)))
    found = fit(train, valid, 3)
    assert found.weights_KF.shape == (3, 12) and found.accuracy(*test) > 0.85


def test_features_that_are_not_finite_are_refused() -> None:
    features, labels = planted(50, 5)
    features[7, 2] = np.nan
    with pytest.raises(UserError, match="not finite"):
        fit((features, labels), (features, labels), 2)


def test_a_row_on_the_border_is_class_0() -> None:
    assert Classifier(1.0, np.ones((1, 2)), np.zeros(1), 0.0).predict(np.array([[1.0, -1.0], [1.0, 0.0]])).tolist() == [0, 1]


@given(rows=st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=12))
def test_no_threshold_is_right_more_often(rows: list[tuple[int, bool]]) -> None:
    values = np.array([value for value, _ in rows], np.float32)
    labels = np.array([int(label) for _, label in rows])
    cut, upward = threshold(values, labels)

    def right(at: float, up: bool) -> int:
        return int(((values > at) == up)[labels == 1].sum() + ((values > at) != up)[labels == 0].sum())

    assert right(cut, upward) == max(right(at, up) for at in np.arange(-4, 4, 0.5) for up in (True, False))


def test_the_histogram_counts_every_row_once() -> None:
    features, labels = planted(500, 4)
    found = histogram(features[:, 3], labels, ("neg", "pos"))
    assert len(found["edges"]) == BINS + 1 and found["edges"] == sorted(found["edges"])
    assert {name: sum(counts) for name, counts in found["counts"].items()} == {"neg": int((labels == 0).sum()), "pos": int(labels.sum())}


def test_values_that_are_nearly_the_same_have_a_histogram() -> None:
    # A saturated unit; as an intercept it may be the one that says most.
    values = np.array([1, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    found = histogram(values, np.array([0, 1]), ("neg", "pos"))
    assert len(set(found["edges"])) == BINS + 1
    assert found["counts"]["neg"][-1] == found["counts"]["pos"][0] == 1


def naive(document: bytes, longest: int) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for n in range(1, longest + 1):
        for i in range(len(document) - n + 1):
            gram = document[i : i + n]
            found[gram] = found.get(gram, 0) + 1
    return found


@given(documents=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), longest=st.integers(1, 5))
def test_the_counts_are_those_of_all_n_grams(documents: list[bytes], longest: int) -> None:
    counts = ngram_counts(documents, longest)
    for row, document in enumerate(documents):
        wanted = naive(document, longest)
        assert counts[row].sum() == sum(wanted.values())
        # A few hundred n-grams in 2^18 buckets rarely meet; when they do, their counts add up.
        assert len(wanted) - 2 <= counts[row].nnz <= len(wanted)


def test_equal_n_grams_share_a_column_wherever_they_stand() -> None:
    counts = ngram_counts([b"abc", b"xxabcxx", b"cba"])
    shared = set(counts[0].indices)
    assert len(shared) == 6 and shared <= set(counts[1].indices)
    assert len(shared & set(counts[2].indices)) == 3  # a, b, c; no longer one


def test_columns_and_weights_come_from_the_training_rows_alone() -> None:
    documents = [b"good film", b"good play", b"bad film", b"bad play"] * 5
    labels = np.array([1, 1, 0, 0] * 5)
    counts = ngram_counts(documents)
    one, (other,) = tf_idf(counts, [ngram_counts([b"good evening"])], labels, columns=30)
    again, _ = tf_idf(counts, [ngram_counts([b"something else"])], labels, columns=30)
    assert one.shape == (20, 30) and other.nnz and abs(one - again).sum() == 0
