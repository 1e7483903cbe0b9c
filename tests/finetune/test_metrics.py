"""Metrics against scikit-learn's definitions, known values, and hand-worked SQuAD cases."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import assume, given
from hypothesis import strategies as st

from overnight.errors import UserError
from overnight.finetune.metrics import exact_match, matthews, normalize_answer, pearson, score, spearman, squad_scores, token_f1

BINARY = st.lists(st.tuples(st.sampled_from("01"), st.sampled_from("01")), min_size=1, max_size=60)
# Whole numbers: a correlation of values that differ in their last bits only is rounding error.
SCORES = st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=2, max_size=60)
TEXT = st.text(alphabet="ab cthe.,'-\u00e9 \u2014", max_size=20)


@given(BINARY)
def test_binary_metrics_are_those_of_the_confusion_table(pairs: list[tuple[str, str]]) -> None:
    gold, guess = [a for a, _ in pairs], [b for _, b in pairs]
    tp, tn = pairs.count(("1", "1")), pairs.count(("0", "0"))
    fp, fn = pairs.count(("0", "1")), pairs.count(("1", "0"))
    scores = score("mrpc", "classification", gold, guess)
    assert scores["accuracy"] == pytest.approx((tp + tn) / len(pairs))
    assert scores["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn) if tp + fp + fn else 0.0)
    root = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert matthews(gold, guess) == pytest.approx((tp * tn - fp * fn) / root if root else 0.0)


def test_each_glue_task_has_its_metrics() -> None:
    gold, guess = ["1", "0", "1", "1"], ["1", "0", "0", "1"]
    assert set(score("cola", "classification", gold, guess)) == {"mcc", "accuracy"}
    assert score("cola", "classification", gold, guess)["mcc"] == pytest.approx(1 / math.sqrt(3))
    assert score("qqp", "classification", gold, guess) == pytest.approx({"accuracy": 0.75, "f1": 0.8})
    for task in ("sst2", "rte", "mnli", "docnames", "imdb"):
        assert score(task, "classification", gold, guess) == {"accuracy": 0.75}
    # Of class 1 2·2/(2·2 + 1), of class 0 2·1/(2·1 + 1).
    assert score("csv", "classification", gold, guess) == pytest.approx({"accuracy": 0.75, "macro_f1": (0.8 + 2 / 3) / 2})
    stsb = score("stsb", "regression", [1.0, 2.0, 3.0, 4.0], [1.0, 4.0, 9.0, 16.0])
    assert stsb["spearman"] == pytest.approx(1.0) and stsb["pearson"] == pytest.approx(0.9843740387)


def test_spearman_gives_ties_their_mean_rank() -> None:
    assert spearman([1, 2, 3, 4], [1, 1, 2, 2]) == pytest.approx(2 / math.sqrt(5))


@given(SCORES, st.randoms())
def test_scores_are_bounded_and_do_not_depend_on_the_order_of_rows(pairs: list[tuple[int, int]], rng: random.Random) -> None:
    mixed = list(pairs)
    rng.shuffle(mixed)
    for kind in ("regression", "classification"):
        task = "stsb" if kind == "regression" else "cola"
        first = score(task, kind, [a for a, _ in pairs], [b for _, b in pairs])
        assert first == pytest.approx(score(task, kind, [a for a, _ in mixed], [b for _, b in mixed]), abs=1e-9)
        assert all(-1 - 1e-9 <= value <= 1 + 1e-9 for value in first.values())


@pytest.mark.parametrize("constant", [[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
def test_a_correlation_with_a_constant_is_zero_without_a_warning(constant: list[float]) -> None:
    for gold, guess in (([1.0, 2.0, 3.0], constant), (constant, [1.0, 2.0, 3.0])):
        assert pearson(gold, guess) == spearman(gold, guess) == 0.0
    assert matthews(["1", "1"], ["1", "1"]) == matthews(["0", "1"], ["1", "1"]) == 0.0


def test_predictions_that_are_not_finite_are_refused_with_their_number() -> None:
    with pytest.raises(UserError, match="task stsb: 2 predictions are not finite; training diverged"):
        score("stsb", "regression", [1.0, 2.0, 3.0], [float("nan"), 1.0, float("inf")])


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Denver  Broncos!", "denver broncos"),
        ("an apple, a pear", "apple pear"),
        ("U.S.A.", "usa"),
        ("Theatre", "theatre"),
        ("the-a", "thea"),
        ("Łódź — the city", "łódź — city"),
        ("The", ""),
    ],
)
def test_answers_are_normalized_as_the_official_script_does(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_f1_counts_repeated_words_as_often_as_both_sides_have_them() -> None:
    assert token_f1("a cat sat", "cat sat down") == pytest.approx(0.8)
    assert token_f1("new york new york", "new york") == pytest.approx(2 / 3)
    assert token_f1("york york", "york york city") == pytest.approx(0.8)
    assert token_f1("dog", "cat") == 0.0
    # evaluate-v1.1.py: no common word is 0, also between two answers that normalize to nothing and so match exactly.
    assert token_f1("the", "a") == 0.0 and exact_match("the", "a") == 1.0


@given(TEXT, TEXT)
def test_f1_is_symmetric_bounded_and_at_least_exact_match(prediction: str, answer: str) -> None:
    f1 = token_f1(prediction, answer)
    assert 0.0 <= f1 <= 1.0 and f1 == pytest.approx(token_f1(answer, prediction))
    assume(normalize_answer(answer))
    assert exact_match(prediction, answer) <= f1 + 1e-12
    assert token_f1(answer, answer) == pytest.approx(1.0)


def test_a_squad_question_takes_its_best_answer_and_a_missing_one_counts_zero() -> None:
    answers = {"q1": ["Denver Broncos", "Broncos"], "q2": ["1967", "in 1967"], "q3": ["nowhere"]}
    scores = squad_scores(answers, {"q1": "the Broncos", "q2": "year 1967 AD", "unknown": "x"})
    # q1: exact; q2: f1 with "1967" is 2*(1/3)*1/(4/3) = 0.5, with "in 1967" 2*(1/3)*(1/2)/(5/6) = 0.4; q3: no prediction.
    assert scores == pytest.approx({"exact_match": 100 / 3, "f1": 50.0})


def test_ten_thousand_predictions_score_as_scikit_learn_and_scipy_say() -> None:
    chance = np.random.default_rng(0)
    for _ in range(10):
        gold = chance.choice(["0", "1"], 1000, p=[0.7, 0.3])
        guess = np.where(chance.random(1000) < 0.6, gold, chance.choice(["0", "1"], 1000))
        both = {**score("cola", "classification", gold, guess), **score("qqp", "classification", gold, guess)}
        assert both["accuracy"] == sklearn.metrics.accuracy_score(gold, guess)
        assert both["mcc"] == sklearn.metrics.matthews_corrcoef(gold, guess)
        assert both["f1"] == sklearn.metrics.f1_score(gold, guess, pos_label="1")
        gold = chance.integers(0, 26, 1000) / 5
        guess = np.where(chance.random(1000) < 0.5, gold, 5 * chance.random(1000)).astype(np.float32)
        assert score("stsb", "regression", gold, guess) == {
            "pearson": scipy.stats.pearsonr(gold, guess.astype(np.float64)).statistic,
            "spearman": scipy.stats.spearmanr(gold, guess).statistic,
        }
