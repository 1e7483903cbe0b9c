"""Metrics of the tasks: accuracy, F1, Matthews, Pearson and Spearman as GLUE uses them, exact match and F1 of SQuAD."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from overnight.errors import TrainingError, UserError
from overnight.finetune.answers import Answer
from overnight.finetune.entities import are_entities, entity_scores

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_EXTRA = "this metric needs scikit-learn and scipy, which are not installed: pip install 'overnight[tasks]'"
# GLUE reports F1 as well as accuracy where the classes are unbalanced.
_WITH_F1 = ("mrpc", "qqp")


def score(task_name: str, kind: str, labels_or_scores: Sequence[Answer], predictions: Sequence[Answer]) -> dict[str, float]:
    """Score predictions by the metrics that GLUE uses for the task (Wang et al. 2018, arXiv:1804.07461, table 1).

    Args:
        task_name: as in :class:`overnight.tasks.examples.TaskData`.
        kind: classification, multi_label or regression.
        labels_or_scores: what is right, one a row.
        predictions: what was answered, one a row.

    Returns:
        `mcc` and `accuracy` for cola; `accuracy` and `f1` (of class `1`) for mrpc and qqp; `pearson` and `spearman` for regression, with one's own numbers also `mean_absolute_error`; where a
        row has any number of classes `micro_f1`, `macro_f1` and `accuracy` (all of its classes are right); one's own classes `accuracy` and
        `macro_f1`; else `accuracy`. All 0 to 1, an error in the unit of the numbers, correlations -1 to 1; a correlation with a constant is 0.

    Raises:
        TrainingError: predictions that are not finite.
    """
    assert len(labels_or_scores) == len(predictions) > 0, (len(labels_or_scores), len(predictions))
    if kind == "regression":
        gold = np.asarray(labels_or_scores, dtype=np.float64)
        guess = np.asarray(predictions, dtype=np.float64)
        if not np.isfinite(guess).all():
            raise TrainingError(
                f"task {task_name}: {int((~np.isfinite(guess)).sum())} predictions are not finite; training diverged, lower the learning rate"
            )
        scores = {"pearson": pearson(gold, guess), "spearman": spearman(gold, guess)}
        return {**scores, "mean_absolute_error": float(np.abs(gold - guess).mean())} if task_name == "csv" else scores
    if kind == "multi_label":
        sets = [[{x} if isinstance(x, str | float) else set(x) for x in side] for side in (labels_or_scores, predictions)]
        exact = sum(a == b for a, b in zip(*sets, strict=True)) / len(sets[0])
        return {"micro_f1": micro_f1(*sets), "macro_f1": macro_f1(*sets), "accuracy": exact}
    gold_labels, guesses = [str(x) for x in labels_or_scores], [str(x) for x in predictions]
    scores = {"accuracy": accuracy(gold_labels, guesses)}
    if task_name == "cola":
        return {"mcc": matthews(gold_labels, guesses), **scores}
    if task_name in _WITH_F1:
        scores["f1"] = f1(gold_labels, guesses, "1")
    if task_name == "csv":
        scores["macro_f1"] = macro_f1([{x} for x in gold_labels], [{x} for x in guesses])
    return scores


def micro_f1(labels: Sequence[AbstractSet[Any]], predictions: Sequence[AbstractSet[Any]]) -> float:
    """Return F1 of all classes of all rows counted together (0 to 1); 0 where there is none on either side."""
    right = sum(len(a & b) for a, b in zip(labels, predictions, strict=True))
    return 2 * right / max(1, sum(map(len, labels)) + sum(map(len, predictions)))


def macro_f1(labels: Sequence[AbstractSet[Any]], predictions: Sequence[AbstractSet[Any]]) -> float:
    """Return the mean of F1 of each class that occurs on either side (0 to 1).

    Of one class a row it is that of scikit-learn's average="macro". Of several, which are columns there, scikit-learn also counts classes that neither side has, as 0.
    """
    right, either = Counter[Any](), Counter[Any]()
    for a, b in zip(labels, predictions, strict=True):
        right.update(a & b)
        either.update([*a, *b])
    return sum(2 * right[label] / count for label, count in either.items()) / max(1, len(either))


def tag_scores(labels: Sequence[str], right: Sequence[Sequence[str]], given: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return `f1`, `precision` and `recall` of entities, if the tags mark such, and `accuracy` of the tags (0 to 1).

    Args:
        labels: every tag of the task.
        right, given: the tags of each sentence.
    """
    scores = entity_scores(right, given)
    return scores if are_entities(labels) else {"accuracy": scores["accuracy"]}


def accuracy(labels: Sequence[str], predictions: Sequence[str]) -> float:
    """Return the share of predictions that equal their label (0 to 1)."""
    return sum(a == b for a, b in zip(labels, predictions, strict=True)) / len(labels)


def f1(labels: Sequence[str], predictions: Sequence[str], positive: str) -> float:
    """Return harmonic mean of precision and recall of one class (0 to 1); 0 where the class occurs on neither side."""
    try:
        from sklearn.metrics import f1_score
    except ImportError:
        raise UserError(_EXTRA) from None

    return float(f1_score(labels, predictions, labels=[positive], average="macro", zero_division=0.0))


def matthews(labels: Sequence[str], predictions: Sequence[str]) -> float:
    """Return Matthews' correlation coefficient (-1 to 1); 0 where one side is constant."""
    try:
        from sklearn.metrics import matthews_corrcoef
    except ImportError:
        raise UserError(_EXTRA) from None

    if len({*labels, *predictions}) == 1:
        return 0.0
    return float(matthews_corrcoef(labels, predictions))


def pearson(labels: Sequence[float] | np.ndarray, predictions: Sequence[float] | np.ndarray) -> float:
    """Return Pearson's correlation coefficient (-1 to 1); 0 where one side is constant or there is one row."""
    try:
        from scipy.stats import pearsonr
    except ImportError:
        raise UserError(_EXTRA) from None

    return float(pearsonr(labels, predictions).statistic) if _varies(labels) and _varies(predictions) else 0.0


def spearman(labels: Sequence[float] | np.ndarray, predictions: Sequence[float] | np.ndarray) -> float:
    """Return Spearman's rank correlation, ties given their mean rank (-1 to 1); 0 where one side is constant or there is one row."""
    try:
        from scipy.stats import spearmanr
    except ImportError:
        raise UserError(_EXTRA) from None

    return float(spearmanr(labels, predictions).statistic) if _varies(labels) and _varies(predictions) else 0.0


def _varies(values: Sequence[float] | np.ndarray) -> bool:
    return bool(np.ptp(np.asarray(values, dtype=np.float64)) > 0)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation and the articles a, an, the, white space collapsed (evaluate-v1.1.py of SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Return 1 if the two are the same after :func:`normalize_answer`, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def token_f1(prediction: str, answer: str) -> float:
    """Return F1 of the bags of words of a prediction and one answer (0 to 1), as evaluate-v1.1.py: no common word is 0, also where both are empty."""
    guess, gold = normalize_answer(prediction).split(), normalize_answer(answer).split()
    common = (Counter(guess) & Counter(gold)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(guess), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def squad2_scores(answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """Return exact match and F1 of SQuAD 2.0, where a question may have no answer and then only the empty text is right.

    As in evaluate-v2.0.py, answers that normalize to nothing do not count beside others, and where one side is empty F1 is 1 if both are, else 0.

    Args:
        answers: the texts of the right answers, by question id; none for a question without an answer.
        predictions: the answered text of every question; empty for no answer.

    Returns:
        `exact_match` and `f1`, and both of the questions with and without an answer (`HasAns_exact`, ..., `NoAns_f1`; only those there
        are), in per cent (0 to 100).
    """
    assert answers and answers.keys() <= predictions.keys(), "every question needs a prediction"
    found = {question: question_scores(texts, predictions[question]) for question, texts in answers.items()}
    parts = {
        "HasAns": [found[question] for question, texts in answers.items() if texts],
        "NoAns": [found[question] for question, texts in answers.items() if not texts],
    }
    exact, f1_scores = zip(*found.values(), strict=True)
    scores = {"exact_match": 100.0 * sum(exact) / len(found), "f1": 100.0 * sum(f1_scores) / len(found)}
    for part, pairs in parts.items():
        for place, name in enumerate(("exact", "f1") if pairs else ()):
            scores[f"{part}_{name}"] = 100.0 * sum(pair[place] for pair in pairs) / len(pairs)
    return scores


def null_threshold(answers: Mapping[str, Sequence[str]], texts: Mapping[str, str], odds: Mapping[str, float]) -> float:
    """Return the threshold of the null odds at which F1 of SQuAD 2.0 is best, the lowest of equals: between two odds, so that no question is decided by rounding.

    Args:
        answers: as of :func:`squad2_scores`.
        texts: the best text that is not empty, by question id.
        odds: score of no answer minus that of the text; above the threshold the question is answered by nothing.
    """
    questions = sorted(answers, key=lambda question: odds[question])
    values = np.array([odds[question] for question in questions])
    gains = np.array([question_scores(answers[q], texts[q])[1] - question_scores(answers[q], "")[1] for q in questions])
    last = np.append(values[1:] != values[:-1], True)  # of equal odds: all of them are answered, or none
    total = np.concatenate([[0.0], np.cumsum(gains)[last]])
    # Far above rounding: of equally good thresholds it is the first.
    best = int(np.argmax(total > total.max() - 1e-9))
    bounds = np.concatenate([[values[0] - 2.0], values[last], [values[-1] + 2.0]])
    return float((bounds[best] + bounds[best + 1]) / 2)


def question_scores(answers: Sequence[str], prediction: str) -> tuple[float, float]:
    """Return exact match and F1 of one question of SQuAD 2.0 (0 to 1)."""
    golds = [text for text in answers if normalize_answer(text)] or [""]
    empty = not normalize_answer(prediction) or golds == [""]
    exact = max(exact_match(prediction, text) for text in golds)
    return exact, exact if empty else max(token_f1(prediction, text) for text in golds)


def squad_scores(answers: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> dict[str, float]:
    """Return exact match and F1 of SQuAD 1.1: of every question the best over its answers, averaged.

    Args:
        answers: the texts of the right answers, by question id; one or more each.
        predictions: the answered text, by question id; a question without one counts 0, as in the official script.

    Returns:
        `exact_match` and `f1`, in per cent (0 to 100) as the official script prints them.
    """
    assert answers and all(answers.values()), "every question needs an answer"
    exact = total = 0.0
    for question, texts in answers.items():
        guess = predictions.get(question)
        if guess is not None:
            exact += max(exact_match(guess, text) for text in texts)
            total += max(token_f1(guess, text) for text in texts)
    return {"exact_match": 100.0 * exact / len(answers), "f1": 100.0 * total / len(answers)}
