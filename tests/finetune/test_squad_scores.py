"""Scores of SQuAD 1.1 and 2.0 equal to the official scripts', on many odd strings, and the threshold of no answer."""

from __future__ import annotations

import random

import pytest

from overnight.finetune.metrics import normalize_answer, null_threshold, squad2_scores, squad_scores
from tests.finetune.official_squad import best_f1_v2, evaluate_v1, evaluate_v2

# Articles, punctuation (ASCII, which is removed, and other, which stays), combining accents, spaces of all kinds, casing that changes lengths.
PIECES = [
    *("a", "an", "the", "The", "THE", "a.", "the-a", "A's", "cat", "Cat", "cats", "in", "1967", "1,967", "U.S.", "l'an", "an\u00e9", "\u00e9"),
    *("", " ", "  ", "\t", "\n", "\u00a0", "\u2003", "\u200b", "-", "\u2014", "'", "\u2019", "\u201c", "!?", "...", "$", "\u20ac", "_", "the_a"),
    *("caf\u0065\u0301", "\u0130", "\u00df", "\ufb01", "\u5317\u4eac", "\u0645\u0631\u062d\u0628\u0627", "\U0001f600", "\u0301", "x" * 40),
]  # fmt: skip


def _text(chance: random.Random) -> str:
    return chance.choice(["", " "]).join(chance.choice(PIECES) for _ in range(chance.randrange(6)))


def _case(chance: random.Random) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Questions with answers, a quarter of them with none, and predictions that are often one of them, or part of one."""
    answers, predictions = {}, {}
    for i in range(100):
        golds = [_text(chance) for _ in range(chance.randrange(1, 4))] if chance.random() < 0.75 else []
        near = chance.choice(golds) if golds and chance.random() < 0.6 else _text(chance)
        answers[str(i)] = golds
        predictions[str(i)] = near if chance.random() < 0.7 else f"{chance.choice(PIECES)} {near}"
        if chance.random() < 0.2:
            predictions[str(i)] = ""
    return answers, predictions


def test_ten_thousand_odd_predictions_score_as_the_official_scripts_say() -> None:
    chance = random.Random(0)
    for _ in range(100):
        answers, predictions = _case(chance)
        assert squad2_scores(answers, predictions) == pytest.approx(evaluate_v2(answers, predictions), abs=1e-9)
        given = {question: golds for question, golds in answers.items() if golds}
        some = {question: text for question, text in predictions.items() if chance.random() < 0.9}
        assert squad_scores(given, some) == pytest.approx(evaluate_v1(given, some), abs=1e-9)


def test_the_chosen_threshold_scores_the_best_f1_of_the_official_sweep() -> None:
    chance = random.Random(1)
    for _ in range(50):
        answers, texts = _case(chance)
        # The sweep takes an answer that normalizes to nothing for one, and an empty prediction for none.
        answers = {question: [text for text in golds if normalize_answer(text)] for question, golds in answers.items()}
        texts = {question: f"cat {text}" for question, text in texts.items()}
        odds = {question: chance.uniform(0.01, 1) for question in answers}
        threshold = null_threshold(answers, texts, odds)
        final = {question: "" if odds[question] > threshold else text for question, text in texts.items()}
        assert squad2_scores(answers, final)["f1"] == pytest.approx(best_f1_v2(answers, texts, odds), abs=1e-9)


def test_equal_odds_are_answered_together_and_all_or_none_is_possible() -> None:
    answers: dict[str, list[str]] = {"a": ["cat"], "b": [], "c": []}
    texts = dict.fromkeys(answers, "cat")
    # Both have odds 1: to answer `a` is to answer `b` too, and `c` alone stays without an answer.
    assert null_threshold(answers, texts, {"a": 1.0, "b": 1.0, "c": 2.0}) == 0.0
    assert null_threshold(answers, texts, {"a": -3.0, "b": 1.0, "c": 2.0}) == -1.0
    assert null_threshold({"b": [], "c": []}, texts, {"b": -5.0, "c": 2.0}) == -6.0
    assert null_threshold({"a": ["cat"]}, texts, {"a": 7.5}) == 8.5
