"""What the outputs of a network say for each kind of task of texts: the answer, and its probabilities.

Shapes: C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Answer = str | float | tuple[str, ...]


def answer_of(kind: str, labels: Sequence[str], output: npt.NDArray[np.floating[Any]]) -> Answer:
    """Return the answer of one row.

    Args:
        kind: classification, multi_label or regression.
        labels: the classes (C).
        output: (C,) logits, or (1,) of a regression.
    """
    if kind == "regression":
        return float(output[0])
    if kind == "multi_label":
        return tuple(label for label, logit in zip(labels, output, strict=True) if logit > 0)
    return labels[int(output.argmax())]


def probabilities(kind: str, output: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Return the probability of each class (C,): they add up to 1, or where a row has several classes each stands alone."""
    logits = output.astype(np.float64)
    if kind == "multi_label":
        return 0.5 * (1 + np.tanh(0.5 * logits))
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def in_words(answer: Answer) -> str:
    """Return an answer as a cell of a table: classes of a row joined by `|`, a number with the fewest digits that are the same float32."""
    if isinstance(answer, float):
        return str(np.float32(answer))
    return answer if isinstance(answer, str) else "|".join(answer)
