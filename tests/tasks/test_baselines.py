"""What is answered without a network: the rule that is described, the best of its kind, and nothing where there is none."""

from __future__ import annotations

import random
import re
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.dummy import DummyClassifier

from overnight.tasks import baselines as module
from overnight.tasks.baselines import baselines, commonest_tags, shared_words
from overnight.tasks.conll import Sentence
from overnight.tasks.examples import Example, TaskData
from overnight.tasks.words import word_pattern


def rows(texts: list[tuple[str, str | None]], labels: list[Any]) -> list[Example]:
    return [Example(str(i), a, b, label) for i, ((a, b), label) in enumerate(zip(texts, labels, strict=True))]


def task_of(train: list[Example], dev: list[Example], **changes: Any) -> TaskData:
    labels = tuple(sorted({str(example.label) for example in train}))
    return replace(TaskData("csv", "classification", labels, train, dev, [], "accuracy"), **changes)


def score(train: list[Example], dev: list[Example], **changes: Any) -> dict[str, float]:
    """Return the share of the dev rows that each rule has right."""
    found = baselines(task_of(train, dev, **changes), train, [dev])
    return {rule: float(np.mean([a == example.label for a, example in zip(given, dev, strict=True)])) for rule, (given,) in found.items()}


def reviews(count: int, seed: int) -> list[Example]:
    rng = random.Random(seed)
    labels = [rng.choice(["bad", "good", "good"]) for _ in range(count)]
    words = {"bad": "dull", "good": "fine"}
    return rows([(" ".join([*rng.choices("abcdefgh", k=6), words[label]]), None) for label in labels], labels)


def test_words_that_decide_are_found_and_the_largest_class_is_that_of_the_training_rows() -> None:
    train, dev = reviews(200, 0), reviews(100, 1)
    good = sum(example.label == "good" for example in dev) / 100
    assert score(train, dev) == {"largest class": good, "word counts": 1.0}
    assert list(score(train, dev, main_metric="mcc")) == ["word counts"], "one answer for all has no correlation"


def test_word_order_counts_by_pairs_of_words() -> None:
    rng = random.Random(0)
    labels = [rng.choice(["yes", "no"]) for _ in range(300)]
    texts = [("not good but long" if label == "no" else "good but not long", None) for label in labels]
    assert score(rows(texts, labels), rows(texts[:50], labels[:50]))["word counts"] == 1.0


def test_stars_and_sets_of_labels_are_answered_as_such() -> None:
    train = [replace(example, label=5.0 if example.label == "good" else 1.0) for example in reviews(200, 0)]
    answers = baselines(task_of(train, train, kind="regression", labels=(), main_metric="spearman"), train, [train])
    assert list(answers) == ["word counts"]
    assert np.allclose(np.array(answers["word counts"][0], float), [float(example.label) for example in train], atol=1.0)  # type: ignore[arg-type]
    both = [replace(example, label=("film", str(example.label))) for example in reviews(200, 0)]
    answers = baselines(task_of(both, both, kind="multi_label", labels=("bad", "film", "good"), main_metric="micro_f1"), both, [both])
    assert list(answers) == ["word counts"]
    assert [set(answer) for answer in answers["word counts"][0]] == [set(example.label) for example in both]  # type: ignore[arg-type]
    alone = [replace(example, label=("good",) if example.label == "good" else ()) for example in reviews(200, 0)]
    answers = baselines(task_of(alone, alone, kind="multi_label", labels=("good",), main_metric="micro_f1"), alone, [alone])
    assert answers["word counts"][0] == [example.label for example in alone]


def test_each_split_is_answered_as_if_it_were_alone() -> None:
    train, splits = reviews(200, 0), [reviews(30, 1), [], reviews(50, 2)]
    together = baselines(task_of(train, splits[0]), train, splits)
    alone = [baselines(task_of(train, split), train, [split]) for split in splits if split]
    assert together == {rule: [alone[0][rule][0], [], alone[1][rule][0]] for rule in ("largest class", "word counts")}


@pytest.mark.parametrize(("labels", "rows_left", "words_left"), [(2, 900, 2700), (3, 600, 2000), (30, 60, 200)])
def test_many_classes_take_fewer_rows_and_words_but_every_class(
    labels: int, rows_left: int, words_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ANSWERS", 1800)
    monkeypatch.setattr(module, "_WEIGHTS", 6000)
    shapes: list[tuple[tuple[int, ...], int]] = []

    def fitted(task: TaskData, x: Any, y: Any, strength: float) -> Any:
        shapes.append((x.shape, len(np.unique(y))))
        return DummyClassifier().fit(x, y)

    monkeypatch.setattr(module, "_fitted", fitted)
    train = rows([(f"a{i} b{i}", None) for i in range(900)], [str(i % labels) for i in range(900)])
    score(train, train[:10])
    assert shapes[-1] == ((rows_left, min(words_left, 3 * rows_left)), labels)


def clauses(count: int, seed: int, letters: str, good: str, bad: str) -> list[Example]:
    """Return rows without spaces: random letters, and somewhere among them the word that tells the label."""
    rng = random.Random(seed)
    labels = [rng.choice(["bad", "good"]) for _ in range(count)]
    at = [rng.randrange(12) for _ in labels]
    texts = ["".join(rng.choices(letters, k=12)) for _ in labels]
    told = [f"{text[:i]}{good if label == 'good' else bad}{text[i:]}" for text, label, i in zip(texts, labels, at, strict=True)]
    return rows([(text, None) for text in told], labels)


@pytest.mark.parametrize(
    ("letters", "good", "bad"),
    [("我你他的是在有", "好", "差"), ("かきくけこさし", "よい", "だめ"), ("กขคงจชซ", "ดี", "แย่"), ("ကခဂငစ", "တော", "ဆိုး")],
)
def test_words_that_decide_are_found_where_no_spaces_part_them(letters: str, good: str, bad: str) -> None:
    train, dev = (clauses(count, seed, letters, good, bad) for seed, count in enumerate((200, 100)))
    assert score(train, dev)["word counts"] == 1.0


def test_pairs_without_spaces_share_characters_and_marks_are_part_of_a_word() -> None:
    pairs = [("我爱你。", "你爱我"), ("ดีมาก", "ดี มาก"), ("हिन्दी में", "में हिन्दी"), ("हिन्दी", "हन्दा"), ("e\u0301te\u0301", "ete")]
    assert shared_words(rows([*pairs], [0.0] * 5)).tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


LETTERS = st.characters(max_codepoint=0x2FFF, exclude_categories=["Mn", "Mc", "Me", "Cs"]).filter(
    lambda c: not (0xE00 <= ord(c) < 0xF00 or 0x1000 <= ord(c) < 0x10A0 or 0x1780 <= ord(c) < 0x1800)
)


@given(st.text(st.sampled_from("aZé ’_-.9ж\n") | LETTERS, max_size=60))
def test_words_of_scripts_with_spaces_are_runs_of_letters_and_digits(text: str) -> None:
    assert word_pattern().findall(text) == re.findall(r"\w+", text)


@given(st.text(st.sampled_from("我你カ゛ー。ดีม่हिन्दीa é\u0301́ｶﾞ葛\U00020000") | st.characters(codec="utf-8"), max_size=40))
def test_no_letter_is_lost_and_no_character_of_a_script_without_spaces_is_beside_another(text: str) -> None:
    found = word_pattern().findall(text)
    assert "".join(c for word in found for c in word if c.isalnum()) == "".join(c for c in text if c.isalnum())
    assert all(sum(c in "我你カーดม葛\U00020000" for c in word) in (0, 1) for word in found)
    assert all(word[0].isalnum() or word[0] == "_" for word in found)


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=4).map(" ".join)


@given(st.lists(st.tuples(WORDS, WORDS, st.sampled_from(["no", "yes"])), min_size=1, max_size=12))
def test_the_threshold_of_shared_words_is_the_best_there_is(found: list[tuple[str, str, str]]) -> None:
    train = rows([(a, b) for a, b, _ in found], [label for *_, label in found])
    shares, gold = shared_words(train), np.array([example.label for example in train])
    best = max(
        np.mean(np.where(shares >= threshold, above, below) == gold)
        for threshold in np.unique(shares)
        for above, below in (("no", "yes"), ("yes", "no"))
    )
    assert score(train, train, labels=("no", "yes"))["shared words"] == pytest.approx(best)


def test_shared_words_rank_pairs_by_what_they_have_in_common() -> None:
    texts = [("a b c", "a b c"), ("a b c", "a b d"), ("a b c", "x y z"), ("a", "A.")]
    assert shared_words(rows(texts, [0.0] * 4)).tolist() == [1.0, 0.5, 0.0, 1.0]
    train = rows(texts, [5.0, 2.5, 0.0, 5.0])
    found = baselines(task_of(train, train, kind="regression", labels=(), main_metric="spearman"), train, [train])
    assert np.allclose(np.array(found["shared words"][0], float), [5.0, 2.5, 0.0, 5.0])


def test_words_of_pairs_are_held_a_row_at_a_time() -> None:
    texts = [(" ".join(f"{i}a{k}" for k in range(40)), " ".join(f"{i}b{k}" for k in range(40))) for i in range(400)]
    train = rows([*texts], ["no", "yes"] * 200)
    tracemalloc.start()
    shared_words(train)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000, "all words of all rows take some millions of bytes"


def test_a_word_has_its_commonest_tag_and_a_new_one_that_of_most_words() -> None:
    train = [Sentence("0", ("Paris", "is", "big"), ("B-LOC", "O", "O")), Sentence("1", ("Paris", "Hilton"), ("B-PER", "I-PER"))] * 2
    train += [Sentence("2", ("Paris",), ("B-LOC",))]
    assert commonest_tags(train, [Sentence("3", ("Hilton", "in", "Paris"), None)]) == [["I-PER", "O", "B-LOC"]]


def test_where_no_rule_applies_there_is_none() -> None:
    three = rows([("a", "b"), ("a", "a"), ("b", "b")], ["x", "y", "z"])
    assert list(score(three, three)) == ["largest class"]
    silent = rows([("...", None), ("!", None)], ["x", "y"])
    assert list(score(silent, silent)) == ["largest class"]
    alike = rows([("a", None), ("b", None)], ["x", "x"])
    assert score(alike, alike) == {"largest class": 1.0, "word counts": 1.0}
