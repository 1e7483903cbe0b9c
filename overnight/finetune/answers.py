"""What the outputs of a network say for each kind of task of texts: the answer, its probabilities, and where it is wrong.

Shapes: C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overnight.tasks.examples import Example

Answer = str | float | tuple[str, ...]
# Rows listed as the worst errors, and characters shown of a text.
_WORST, _SHOWN = 20, 300


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


def errors(
    kind: str, labels: Sequence[str], examples: Sequence[Example], outputs: Sequence[npt.NDArray[np.floating[Any]]]
) -> dict[str, Any]:
    """Return what `errors.json` holds: where the answers are wrong.

    Returns:
        `labels` and `confusion`, rows by right label and columns by answer (of several classes `counts`: right, too many and too few
        of each); `worst`, the rows that are furthest from what is right, worst first, each with its texts, `label`, `answer` and
        the `probability` of what is right (of a regression `error`).
    """
    found: dict[str, Any] = {}
    given = [answer_of(kind, labels, output) for output in outputs]
    if kind == "classification":
        place = {label: i for i, label in enumerate(labels)}
        table = np.zeros((len(labels), len(labels)), int)
        for example, answer in zip(examples, given, strict=True):
            table[place[str(example.label)], place[str(answer)]] += 1
        found = {"labels": list(labels), "confusion": table.tolist()}
    elif kind == "multi_label":
        sides = (map(_classes, examples), (answer for answer in given if isinstance(answer, tuple)))
        right, answered = (np.array([[label in each for label in labels] for each in side]) for side in sides)
        counts = {"right": right & answered, "too_many": answered & ~right, "too_few": right & ~answered}
        found = {"labels": list(labels), "counts": {name: flags.sum(0).tolist() for name, flags in counts.items()}}
    wrong = [i for i, (example, answer) in enumerate(zip(examples, given, strict=True)) if not _is_right(example, answer)]
    distance = {i: _distance(kind, labels, examples[i], outputs[i]) for i in wrong}
    worst = sorted(wrong, key=lambda i: -distance[i])[:_WORST]
    return {**found, "worst": [_row(kind, examples[i], given[i], distance[i]) for i in worst]}


def _is_right(example: Example, answer: Answer) -> bool:
    if isinstance(answer, tuple):  # in the order of the network's outputs; the file has its own
        return set(answer) == set(_classes(example))
    return answer == example.label


def _classes(example: Example) -> tuple[str, ...]:
    assert isinstance(example.label, tuple)
    return example.label


def _distance(kind: str, labels: Sequence[str], example: Example, output: npt.NDArray[np.floating[Any]]) -> float:
    """Return how wrong an answer is: the difference of a regression, else 1 less the probability of what is right."""
    if kind == "regression":
        assert isinstance(example.label, float)
        return abs(float(output[0]) - example.label)
    p = probabilities(kind, output)
    if kind == "classification":
        return 1 - float(p[labels.index(str(example.label))])
    return 1 - float(np.where([label in _classes(example) for label in labels], p, 1 - p).prod())


def _row(kind: str, example: Example, answer: Answer, distance: float) -> dict[str, Any]:
    texts = {"text": example.text_a} if example.text_b is None else {"text_a": example.text_a, "text_b": example.text_b}
    how = {"error": distance} if kind == "regression" else {"probability": 1 - distance}
    return {
        "id": example.id,
        **{key: text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…" for key, text in texts.items()},
        "label": example.label,
        "answer": answer,
        **how,
    }
