"""Where the answers of a fine-tuned task are wrong: what `errors.json` holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from overnight.finetune.answers import Answer, answer_of, probabilities
from overnight.finetune.metrics import question_scores
from overnight.tasks.conll import Sentence
from overnight.tasks.examples import Example
from overnight.tasks.squad import Question

# Rows listed as the worst errors, and characters shown of a text.
_WORST, _SHOWN = 20, 300


def errors(
    kind: str, labels: Sequence[str], examples: Sequence[Example], outputs: Sequence[npt.NDArray[np.floating[Any]]]
) -> dict[str, Any]:
    """Return what `errors.json` holds of texts.

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


def tag_errors(labels: Sequence[str], sentences: Sequence[Sentence], given: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return what `errors.json` holds of words with tags.

    Args:
        labels: the tags of the training sentences; the right ones may have others.
        sentences: each with its right tags.
        given: the tags that were answered.

    Returns:
        `labels` and `confusion`, words by right tag and by answer; `worst`, the sentences with most wrong tags, each with its wrong words
        and the right tags of those as `label`, what was answered as `answer`, and their number as `wrong_tags`.
    """
    every = (*labels, *sorted({tag for sentence in sentences for tag in sentence.tags or ()} - set(labels)))
    place = {label: i for i, label in enumerate(every)}
    table = np.zeros((len(every), len(every)), int)
    rows: list[dict[str, Any]] = []
    for sentence, answers in zip(sentences, given, strict=True):
        tagged = list(zip(sentence.words, sentence.tags or (), answers, strict=True))
        for _, right, answer in tagged:
            table[place[right], place[answer]] += 1
        if wrong := [triple for triple in tagged if triple[1] != triple[2]]:
            row = {"id": sentence.id, "text": _cut(" ".join(sentence.words)), "label": [f"{word} {right}" for word, right, _ in wrong]}
            rows.append({**row, "answer": [f"{word} {answer}" for word, _, answer in wrong], "wrong_tags": len(wrong)})
    worst = sorted(rows, key=lambda row: -row["wrong_tags"])[:_WORST]
    return {"labels": list(every), "confusion": table.tolist(), "worst": worst}


def question_errors(
    questions: Sequence[Question], predictions: Mapping[str, str], nbest: Mapping[str, Sequence[Mapping[str, str | float]]]
) -> dict[str, Any]:
    """Return what `errors.json` holds of questions about paragraphs.

    Args:
        questions: with their right answers; none where the paragraph has no answer.
        predictions: the answer by id; empty is that there is none.
        nbest: what `nbest_predictions.json` holds.

    Returns:
        `worst`, the questions with the lowest F1, of equal ones first that whose answer is likeliest by the network, each with the question, the texts of its right answers, the answer and `f1` (0 to 1).
    """

    def likelihood(question: str) -> float:
        return max(
            (float(one["probability"]) for one in nbest.get(question, ()) if one["text"] == predictions.get(question, "")), default=0.0
        )

    scored = [(question_scores([answer.text for answer in q.answers], predictions.get(q.id, ""))[1], q) for q in questions]
    wrong = [(score, -likelihood(q.id), q) for score, q in scored if score < 1]
    worst = [(score, q) for score, _, q in sorted(wrong, key=lambda one: one[:2])[:_WORST]]
    rows = [
        {
            "id": q.id,
            "text": _cut(q.question),
            "label": list(dict.fromkeys(_cut(answer.text) for answer in q.answers)),
            "answer": [_cut(text)] if (text := predictions.get(q.id, "")) else [],
            "f1": score,
        }
        for score, q in worst
    ]
    return {"worst": rows}


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
        **{key: _cut(text) for key, text in texts.items()},
        "label": example.label,
        "answer": answer,
        **how,
    }


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
