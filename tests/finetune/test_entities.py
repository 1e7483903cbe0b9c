"""Entities and their F1 against conlleval, written again line by line as its rules are stated, on random tags of every scheme."""

from __future__ import annotations

import random

import pytest

from overnight.finetune.entities import are_entities, entities, entity_scores

# (mark of the word before, mark of the word) between which an entity of the same type ends, or begins: the conditions of conlleval.
ENDS = {("B", "B"), ("B", "S"), ("B", "O"), ("I", "B"), ("I", "S"), ("I", "O"), *(("E", m) for m in "BIESO"), *(("S", m) for m in "BIESO")}
BEGINS = {*((m, "B") for m in "BIESO"), *((m, "S") for m in "BIESO"), *((m, mark) for m in "ESO" for mark in "IE")}


def conlleval(right: list[list[str]], given: list[list[str]]) -> dict[str, float]:
    """Count entities as conlleval reads its two columns: one state machine over all words, with an empty line after each sentence."""
    correct = wanted = found = equal = words = 0
    inside = False
    before = (("O", ""), ("O", ""))
    for golds, guesses in zip(right, given, strict=True):
        for gold, guess in zip([*golds, "O"], [*guesses, "O"], strict=True):
            now = tuple((tag[0], tag[2:]) for tag in (gold, guess))
            end = [(b[0], n[0]) in ENDS or (b[0] != "O" and b[1] != n[1]) for b, n in zip(before, now, strict=True)]
            begin = [(b[0], n[0]) in BEGINS or (n[0] != "O" and b[1] != n[1]) for b, n in zip(before, now, strict=True)]
            if inside and all(end):
                inside, correct = False, correct + 1
            elif inside and (end[0] != end[1] or now[0][1] != now[1][1]):
                inside = False
            if begin[0] and begin[1] and now[0][1] == now[1][1]:
                inside = True
            wanted, found = wanted + begin[0], found + begin[1]
            before = now
        words += len(golds)
        equal += sum(a == b for a, b in zip(golds, guesses, strict=True))
    precision, recall = correct / max(1, found), correct / max(1, wanted)
    return {
        "f1": 2 * precision * recall / (precision + recall) if correct else 0.0,
        "precision": precision,
        "recall": recall,
        "accuracy": equal / words,
    }


@pytest.mark.parametrize("marks", ["I", "BI", "BIES"])
def test_ten_thousand_random_words_score_as_conlleval_says(marks: str) -> None:
    chance = random.Random(len(marks))
    tags = ["O", "O", *(f"{mark}-{kind}" for mark in marks for kind in ("PER", "LOC-X"))]
    for _ in range(100):
        right = [[chance.choice(tags) for _ in range(chance.randrange(1, 12))] for _ in range(17)]
        given = [[tag if chance.random() < 0.8 else chance.choice(tags) for tag in sentence] for sentence in right]
        assert entity_scores(right, given) == pytest.approx(conlleval(right, given))
    nothing = [["O", "O"]]
    assert entity_scores(nothing, nothing) == conlleval(nothing, nothing) == {"f1": 0, "precision": 0, "recall": 0, "accuracy": 1}


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("I-A I-A O I-A", [("A", 0, 1), ("A", 3, 3)]),  # IOB1
        ("I-A B-A I-B", [("A", 0, 0), ("A", 1, 1), ("B", 2, 2)]),
        ("B-A I-A B-A O", [("A", 0, 1), ("A", 2, 2)]),  # IOB2
        ("B-A I-A E-A S-B O S-A", [("A", 0, 2), ("B", 3, 3), ("A", 5, 5)]),  # IOBES
        ("E-A I-A S-A E-A", [("A", 0, 0), ("A", 1, 1), ("A", 2, 2), ("A", 3, 3)]),  # and what no scheme writes
        ("O O", []),
    ],
)
def test_entities_are_those_of_every_scheme(tags: str, found: list[tuple[str, int, int]]) -> None:
    assert entities(tags.split()) == found


def test_tags_that_mark_no_entities_are_told_from_those_that_do() -> None:
    assert are_entities({"O", "B-PER", "I-PER"}) and are_entities({"O", "S-X"})
    assert not any(map(are_entities, ({"O"}, {"B-X", "I-X"}, {"O", "NN"}, {"O", "B-"}, {"NOUN", "VERB"}, {"O", "X-PER"})))
