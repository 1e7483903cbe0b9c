"""How the answers of a task are scored where the right ones are known, and the files that say what was answered and where it was wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from overnight.finetune import metrics, question_answering
from overnight.finetune.answers import answer_of
from overnight.finetune.error_analysis import errors, question_errors, tag_errors
from overnight.finetune.tagging import conll_text
from overnight.state_files import sealed
from overnight.tasks.conll import Sentence
from overnight.tasks.examples import Example
from overnight.tasks.squad import Question


def evaluate_texts(
    name: str, kind: str, labels: Sequence[str], examples: Sequence[Example], outputs: list[np.ndarray]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Score the outputs for labeled texts; returns the metrics, and the files of the task."""
    given = [answer_of(kind, labels, output) for output in outputs]
    scores = metrics.score(name, kind, [example.label for example in examples if example.label is not None], given)
    return scores, {
        "predictions.json": {example.id: answer for example, answer in zip(examples, given, strict=True)},
        "errors.json": sealed(errors(kind, labels, examples, outputs)),
    }


def evaluate_tags(
    labels: Sequence[str], sentences: Sequence[Sentence], given: Sequence[list[str]]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Score the tags that were given to tagged sentences; returns the metrics, and the files of the task."""
    return metrics.tag_scores(labels, [sentence.tags or () for sentence in sentences], given), {
        "predictions.json": {sentence.id: tags for sentence, tags in zip(sentences, given, strict=True)},
        "predictions.conll": conll_text(sentences, given),
        "errors.json": sealed(tag_errors(labels, sentences, given)),
    }


def evaluate_questions(
    windows: Sequence[question_answering.Window], questions: Sequence[Question], with_null: bool, max_answer: int, outputs: list[np.ndarray]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Score the answers to questions, of which some may have none where `with_null`; returns the metrics, and the files of the task."""
    starts, ends = [o[:, 0] for o in outputs], [o[:, 1] for o in outputs]
    predictions, nbest = question_answering.best_answers(windows, starts, ends, max_answer=max_answer)
    right = {q.id: [a.text for a in q.answers] for q in questions}
    odds: dict[str, float] = {}
    if with_null:
        odds, nbest = question_answering.against_null(windows, starts, ends, nbest)
        threshold = metrics.null_threshold(right, predictions, odds)
        predictions = {question: "" if odds[question] > threshold else text for question, text in predictions.items()}
        scores = {**metrics.squad2_scores(right, predictions), "null_threshold": threshold}
    else:
        scores = metrics.squad_scores(right, predictions)
    return scores, question_files(questions, predictions, nbest, odds)


def question_files(
    questions: Sequence[Question], predictions: Mapping[str, str], nbest: Mapping[str, Any], odds: Mapping[str, float]
) -> dict[str, Any]:
    """Return the files of a task of questions, as the scripts of SQuAD have them, and `errors.json`.

    Args:
        predictions, nbest, odds: by the ids of the questions; no odds where all have an answer.
    """
    return {
        **({"null_odds.json": odds} if odds else {}),
        "predictions.json": predictions,
        "nbest_predictions.json": nbest,
        "errors.json": sealed(question_errors(questions, predictions, nbest)),
    }
