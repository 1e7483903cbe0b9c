"""The official evaluations of SQuAD 1.1 and 2.0, written again from their description, as a reference.

Rajpurkar et al. 2016, section 6.1, and 2018, section 5; the two scripts differ where a side is empty.
"""

from __future__ import annotations

import collections
import re
import string


def normal(text: str) -> str:
    """Return a text as both scripts compare it: lower case, then without punctuation, then without articles, then single spaces."""
    kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def overlap(gold: str, guess: str) -> float:
    """Return F1 of two bags of words that have one in common, 0 where they have none."""
    a, b = normal(gold).split(), normal(guess).split()
    same = sum((collections.Counter(a) & collections.Counter(b)).values())
    if not same:
        return 0.0
    return 2 * (same / len(b)) * (same / len(a)) / (same / len(b) + same / len(a))


def evaluate_v1(answers: dict[str, list[str]], predictions: dict[str, str]) -> dict[str, float]:
    """Return what evaluate-v1.1.py prints: a question without prediction is counted, with 0."""
    exact = f1 = 0.0
    for question, golds in answers.items():
        if question in predictions:
            exact += max(normal(gold) == normal(predictions[question]) for gold in golds)
            f1 += max(overlap(gold, predictions[question]) for gold in golds)
    return {"exact_match": 100 * exact / len(answers), "f1": 100 * f1 / len(answers)}


def raw_scores_v2(golds: list[str], guess: str) -> tuple[float, float]:
    """Return exact match and F1 of one question of SQuAD 2.0; golds that normalize to nothing are left out, and none is the empty one."""
    golds = [gold for gold in golds if normal(gold)] or [""]
    f1 = []
    for gold in golds:
        a, b = normal(gold).split(), normal(guess).split()
        f1.append(float(a == b) if not a or not b else overlap(gold, guess))
    return float(max(normal(gold) == normal(guess) for gold in golds)), max(f1)


def evaluate_v2(answers: dict[str, list[str]], predictions: dict[str, str]) -> dict[str, float]:
    """Return what evaluate-v2.0.py writes of predictions, under the names that are used here."""
    scores = {question: raw_scores_v2(golds, predictions[question]) for question, golds in answers.items()}
    has = [question for question in answers if answers[question]]
    not_has = [question for question in answers if not answers[question]]
    result = {}
    for prefix, questions in (("", list(answers)), ("HasAns_", has), ("NoAns_", not_has)):
        if questions:
            exact = 100.0 * sum(scores[question][0] for question in questions) / len(questions)
            f1 = 100.0 * sum(scores[question][1] for question in questions) / len(questions)
            result |= {f"{prefix}exact" if prefix else "exact_match": exact, f"{prefix}f1": f1}
    return result


def best_f1_v2(answers: dict[str, list[str]], predictions: dict[str, str], no_answer: dict[str, float]) -> float:
    """Return `best_f1`, as the script sweeps the threshold upwards from a point where nothing is answered; the probabilities differ."""
    current = best = float(sum(not golds for golds in answers.values()))
    for question in sorted(no_answer, key=lambda q: no_answer[q]):
        if answers[question]:
            current += raw_scores_v2(answers[question], predictions[question])[1]
        else:
            current -= 1 if predictions[question] else 0
        best = max(best, current)
    return 100.0 * best / len(answers)
