"""L1-regularised logistic regression on frozen features, its strength chosen on validation rows, and what a single unit knows.

Shapes: n rows, F features, K rows of weights: 1 for two classes, one for each of more (one against the rest).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overnight.errors import UserError

STRENGTHS = tuple(2.0**power for power in range(-8, 1))
"""The published grid of C, the inverse of the penalty (Radford et al. 2017, Puri et al. 2018); the smallest of equals is taken."""
BINS = 25

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
        """Class numbers of rows (n, F), dense or sparse."""
        scores = np.asarray(features @ self.weights_KF.T) + self.bias_K
        return (scores[:, 0] > 0).astype(np.int64) if len(self.weights_KF) == 1 else scores.argmax(1)

    def accuracy(self, features: Any, labels: Labels) -> float:
        """Share of rows that are answered right (0 to 1)."""
        return float(np.mean(self.predict(features) == labels))

    @property
    def used(self) -> int:
        """Features with a weight that is not 0."""
        return int((self.weights_KF != 0).any(0).sum())


def fit(train: tuple[Any, Labels], valid: tuple[Any, Labels], classes: int, seed: int = 0) -> Classifier:
    """Fit at every strength of the grid, and keep the fit that is right most often on the validation rows.

    The solver is liblinear, as in the published evaluations, and as there the intercept is penalised like a weight.

    Args:
        train, valid: features (n, F), dense or sparse, and class numbers.
        classes: how many there are.
        seed: order of the solver's coordinates.

    Raises:
        UserError: when scikit-learn is not installed, or the features are not finite.
    """
    x = train[0].astype(np.float64)  # once, else the solver copies at every strength
    if not np.isfinite(x.data if hasattr(x, "indptr") else x).all():
        raise UserError("the features are not finite: the model has diverged")
    fits = (_fit(x, train[1], strength, classes, seed) for strength in STRENGTHS)
    best: Classifier | None = None
    for strength, (weights, bias) in zip(STRENGTHS, fits, strict=True):
        found = Classifier(strength, weights, bias, 0.0)
        found = Classifier(strength, weights, bias, found.accuracy(*valid))
        if best is None or found.valid > best.valid:
            best = found
    assert best is not None
    return best


def _fit(x: Any, y: Labels, strength: float, classes: int, seed: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    try:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise UserError("transfer needs scikit-learn, which is not installed: pip install 'overnight[tasks]'") from None
    # From 1.8 on the penalty is said as a ratio; before, a ratio is for the elastic net alone.
    kind = {"penalty": "l1"} if LogisticRegression().penalty == "l2" else {"l1_ratio": 1.0}
    rows = []
    for one in [1] if classes == 2 else range(classes):
        with warnings.catch_warnings():
            # 100 steps, as published, are enough where the strength is not far too great.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = LogisticRegression(C=strength, solver="liblinear", random_state=seed, max_iter=100, **kind)
            model.fit(x, y == one)
        rows.append((model.coef_[0], model.intercept_[0]))
    return np.stack([row[0] for row in rows]), np.array([row[1] for row in rows])


def best_unit(classifier: Classifier) -> int:
    """The feature that alone says most: that with the greatest L1 norm of its weights, as in Radford et al. 2017 and Puri et al. 2018."""
    return int(np.abs(classifier.weights_KF).sum(0).argmax())


def threshold(values: npt.NDArray[np.float32], labels: Labels) -> tuple[float, bool]:
    """The threshold of one feature that is right most often on rows of two classes.

    Returns:
        the threshold, half way between two values, and whether class 1 lies above it.
    """
    order = np.argsort(values, kind="stable")
    ranked, ones = values[order].astype(np.float64), labels[order] == 1
    # Right answers if the first k rows are called 0 and the others 1, for k = 0 to n.
    right = np.concatenate([[0], np.cumsum(~ones)]) + (ones.sum() - np.concatenate([[0], np.cumsum(ones)]))
    between = np.concatenate([[True], ranked[1:] > ranked[:-1], [True]])  # equal values cannot be told apart
    places = np.flatnonzero(between)
    above, below = places[right[places].argmax()], places[right[places].argmin()]
    upward = bool(right[above] >= len(values) - right[below])
    k = above if upward else below
    cut = ranked[0] - 1 if k == 0 else ranked[-1] + 1 if k == len(ranked) else (ranked[k - 1] + ranked[k]) / 2
    return float(cut), upward


def histogram(values: npt.NDArray[np.float32], labels: Labels, names: Sequence[str]) -> dict[str, Any]:
    """How often a feature has which value in each class: `edges` of 25 bins of equal width, and `counts` by class name."""
    edges = np.histogram_bin_edges(values, BINS)
    counts = {name: np.histogram(values[labels == i], edges)[0].tolist() for i, name in enumerate(names)}
    return {"edges": [float(f"{edge:.6g}") for edge in edges], "counts": counts}
