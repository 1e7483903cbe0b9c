"""Where tags and answers to questions are wrong."""

from __future__ import annotations

from overnight.finetune.error_analysis import question_errors, tag_errors
from overnight.report.task_errors import row_text
from overnight.tasks.conll import Sentence
from overnight.tasks.squad import Answer, Question


def test_wrong_tags_are_counted_by_word_and_listed_by_sentence_the_worst_first() -> None:
    sentences = [
        Sentence("0", ("in", "Bonn"), ("O", "B-LOC")),
        Sentence("1", ("Ann", "saw", "Rome"), ("B-PER", "O", "B-NEW")),
        Sentence("2", ("so",), ("O",)),
    ]
    found = tag_errors(("O", "B-LOC", "B-PER"), sentences, [["O", "O"], ["B-LOC", "O", "B-LOC"], ["O"]])
    assert found["labels"] == ["O", "B-LOC", "B-PER", "B-NEW"]  # the last is of no training sentence
    assert found["confusion"] == [[3, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    assert [row["id"] for row in found["worst"]] == ["1", "0"]
    assert row_text(found["worst"][0]) == "1: Ann saw Rome (right: Ann B-PER, Rome B-NEW; answered: Ann B-LOC, Rome B-LOC; 2 wrong tags)"


def test_the_worst_answers_are_those_of_the_lowest_f1_the_surest_first_and_a_right_one_is_not_listed() -> None:
    def asked(name: str, *answers: str) -> Question:
        return Question(name, "t", f"what {name}?", "c", tuple(Answer(text, 0) for text in answers), not answers)

    questions = [asked("a", "the red fox", "fox"), asked("b", "two words"), asked("c"), asked("e", "x"), asked("d")]
    likely: dict[str, list[dict[str, str | float]]] = {
        "d": [{"text": "some", "probability": 0.5}],
        "e": [{"text": "", "probability": 0.25}],
    }
    found = question_errors(questions, {"a": "a Fox", "b": "words", "c": "", "d": "some", "e": ""}, likely)["worst"]
    assert [(row["id"], row["f1"]) for row in found] == [("d", 0), ("e", 0), ("b", 2 / 3)]
    assert row_text(found[0]) == "d: what d? (right: none; answered: some; F1 0.0 %)"
    assert row_text(found[2]) == "b: what b? (right: two words; answered: words; F1 66.7 %)"
