"""L1-regularized logistic regression on frozen features, its strength chosen on validation rows, and what a single unit knows.

Shapes: n rows, F features, K rows of weights: 1 for two classes, one for each of more (one against the rest).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from overnight.errors import UserError

STRENGTHS = tuple(2.0**power for power in range(-8, 1))
"""The published grid of C, the inverse of the penalty (Radford et al. 2017, Puri et al. 2018); the smallest of equals is taken."""
BINS = 25
_NEAR = 1e-3
"""How far, as a share of the penalty of a weight, a fit of dense features may be from an optimum."""

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Classifier:
    """A fitted regression."""

    strength: float
    """C."""
    weights_KF: npt.NDArray[np.float64]
    bias_K: npt.NDArray[np.float64]
    valid: float
    """Accuracy on the validation rows, by which C was chosen (0 to 1)."""

    def predict(self, features: Any) -> Labels:
        """Return class numbers of rows (n, F), dense or sparse."""
        scores = np.asarray(features @ self.weights_KF.T) + self.bias_K
        return (scores[:, 0] > 0).astype(np.int64) if len(self.weights_KF) == 1 else scores.argmax(1)

    def accuracy(self, features: Any, labels: Labels) -> float:
        """Return the share of rows that are answered right (0 to 1)."""
        return float(np.mean(self.predict(features) == labels))

    @property
    def used(self) -> int:
        """Features with a weight that is not 0."""
        return int((self.weights_KF != 0).any(0).sum())


def check_installed() -> None:
    """Check that there is what a regression needs.

    Raises:
        UserError: scikit-learn or scipy is not installed.
    """
    if missing := [name for name, module in (("scikit-learn", "sklearn"), ("scipy", "scipy")) if importlib.util.find_spec(module) is None]:
        raise UserError(f"linear-probe needs {' and '.join(missing)}, which this Python lacks: pip install 'overnight[tasks]'")


def fit(train: tuple[Any, Labels], valid: tuple[Any, Labels], classes: int, seed: int = 0) -> Classifier:
    """Fit at every strength of the grid, and keep the fit that is right most often on the validation rows.

    As in the published evaluations, the intercept is penalized like a weight. Sparse features are fitted by liblinear, as there. The
    features of a network are dense and alike, over which its descent by single coordinates crawls; they are fitted by Newton's method, each
    step of which is a lasso (as in Friedman et al. 2010) that least-angle regression solves exactly.

    Args:
        train, valid: features (n, F), dense or sparse, and class numbers.
        classes: how many there are.
        seed: order of liblinear's coordinates.

    Raises:
        UserError: when the features are not finite.
    """
    x, sparse = train[0].astype(np.float64), hasattr(train[0], "indptr")  # once, else the solver copies at every strength
    if not np.isfinite(x.data if sparse else x).all():
        raise UserError("the features are not finite: the model has diverged")
    paths = [
        by_liblinear(x, train[1] == one, seed) if sparse else by_newton(x, train[1] == one)
        for one in ([1] if classes == 2 else range(classes))
    ]
    best: Classifier | None = None
    for strength, rows in zip(STRENGTHS, zip(*paths, strict=True), strict=True):
        found = Classifier(strength, np.stack([row[:-1] for row in rows]), np.array([row[-1] for row in rows]), 0.0)
        found = replace(found, valid=found.accuracy(*valid))
        if best is None or found.valid > best.valid:
            best = found
    assert best is not None
    return best


def by_liblinear(x: Any, y: npt.NDArray[np.bool_], seed: int) -> Iterator[npt.NDArray[np.float64]]:
    """Yield weights and intercept (F + 1) at every strength, of features (n, F) and whether a row is of the class (n)."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # From 1.8 on the penalty is said as a ratio; before, a ratio is for the elastic net alone.
    kind = {"penalty": "l1"} if LogisticRegression().penalty == "l2" else {"l1_ratio": 1.0}
    for strength in STRENGTHS:
        with warnings.catch_warnings():
            # 100 steps, as published, are enough where the strength is not far too great.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(C=strength, solver="liblinear", random_state=seed, max_iter=100, **kind)
            model.fit(x, y)
        yield np.append(model.coef_[0], model.intercept_[0])


def by_newton(x: npt.NDArray[np.float64], y: npt.NDArray[np.bool_]) -> Iterator[npt.NDArray[np.float64]]:
    """Yield weights and intercept (F + 1) at every strength, each begun where the one before ended, of dense features (n, F).

    The loss is |w| + C * (sum of log(1 + exp(-z)) over the rows), with z the score in favor of the right class.
    """
    from scipy.special import expit
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import lars_path_gram

    x = np.hstack([x, np.ones((len(x), 1))])
    sign, w = np.where(y, 1.0, -1.0), np.zeros(x.shape[1])

    def loss(w: npt.NDArray[np.float64], scores: npt.NDArray[np.float64]) -> float:
        return float(np.abs(w).sum() + strength * np.logaddexp(0, -sign * scores).sum())

    for strength in STRENGTHS:
        for _ in range(100):
            scores = x @ w
            p = expit(scores)
            gradient = strength * (x.T @ (p - y))
            if _off(gradient, w) <= _NEAR:
                break
            root = x * np.sqrt(strength * p * (1 - p))[:, None]
            hessian = root.T @ root
            hessian[np.diag_indices_from(hessian)] *= 1 + 1e-9  # else columns that are the same have no one solution
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                *_, aim = lars_path_gram(
                    hessian @ w - gradient, hessian, n_samples=1, alpha_min=1.0, method="lasso", max_iter=8 * len(w), return_path=False
                )
            move = aim - w
            along, slope = x @ move, gradient @ move + np.abs(aim).sum() - np.abs(w).sum()
            here, share = loss(w, scores), 1.0
            while share > 1e-6 and loss(w + share * move, scores + share * along) > here + 1e-4 * share * slope:
                share /= 2
            w = w + share * move
            if share <= 1e-6:  # as near as the numbers allow
                break
        yield w


def distance(x: npt.NDArray[np.float64], y: npt.NDArray[np.bool_], strength: float, w: npt.NDArray[np.float64]) -> float:
    """Return how far weights and intercept are from an optimum, as a share of the penalty of a weight; 0 or less is one."""
    from scipy.special import expit

    residual = expit(x @ w[:-1] + w[-1]) - y
    return _off(strength * np.append(x.T @ residual, residual.sum()), w)


def _off(gradient: npt.NDArray[np.float64], w: npt.NDArray[np.float64]) -> float:
    """Return how far the gradient is from that of an optimum: there it is -sign(w) where w is not 0, and between -1 and 1 elsewhere."""
    return float(np.where(w != 0, np.abs(gradient + np.sign(w)), np.abs(gradient) - 1).max())


def best_unit(classifier: Classifier) -> int:
    """Return the feature that alone says most: that with the greatest L1 norm of its weights, as in Radford et al. 2017 and Puri et al. 2018."""
    return int(np.abs(classifier.weights_KF).sum(0).argmax())


def threshold(values: npt.NDArray[np.float32], labels: Labels) -> tuple[float, bool]:
    """Return the threshold of one feature that is right most often on rows of two classes.

    Returns:
        the threshold, half way between two values, and whether class 1 lies above it.
    """
    order = np.argsort(values, kind="stable")
    ranked, ones = values[order].astype(np.float64), labels[order] == 1
    # Right answers if the first k rows are called 0 and the others 1, for k = 0 to n.
    right = np.concatenate([[0], np.cumsum(~ones)]) + (ones.sum() - np.concatenate([[0], np.cumsum(ones)]))
    between = np.concatenate([[True], ranked[1:] > ranked[:-1], [True]])  # equal values cannot be distinguished
    places = np.flatnonzero(between)
    above, below = places[right[places].argmax()], places[right[places].argmin()]
    upward = bool(right[above] >= len(values) - right[below])
    k = above if upward else below
    split_at = ranked[0] - 1 if k == 0 else ranked[-1] + 1 if k == len(ranked) else (ranked[k - 1] + ranked[k]) / 2
    return float(split_at), upward


def histogram(values: npt.NDArray[np.floating[Any]], labels: Labels, names: Sequence[str]) -> dict[str, Any]:
    """Return how often a feature has which value in each class: `edges` of 25 bins of equal width, and `counts` by class name."""
    values = values.astype(np.float64)  # in float32 there are no 25 bins between values that are nearly the same
    edges = np.histogram_bin_edges(values, BINS)
    counts = {name: np.histogram(values[labels == i], edges)[0].tolist() for i, name in enumerate(names)}
    return {"edges": [float(f"{edge:.9g}") for edge in edges], "counts": counts}
