"""SQuAD's JSON: the real files, the split made of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overnight.errors import DataError
from overnight.tasks import squad
from overnight.tasks.squad import load_squad, question_lines, read_squad


def _squad(
    *questions: tuple[str | int, list[tuple[str, int]]], context: str = "The cat sat on the mat.", title: str = "Cats"
) -> dict[str, Any]:
    qas = [{"id": q, "question": "who?", "answers": [{"text": t, "answer_start": s} for t, s in answers]} for q, answers in questions]
    return {"version": "1.1", "data": [{"title": title, "paragraphs": [{"context": context, "qas": qas}]}]}


def _write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_the_real_files_have_the_published_counts_and_every_answer_stands_at_its_place(data: Path) -> None:
    questions, notes = read_squad(data / "squad" / "dev-v1.1.json")
    assert (len(questions), len({q.title for q in questions}), sum(len(q.answers) for q in questions), notes) == (10_570, 48, 34_726, ())
    assert all(q.context[a.start : a.start + len(a.text)] == a.text for q in questions for a in q.answers)
    questions, notes = read_squad(data / "squad" / "train-v2.0-10articles.json")
    assert (len(questions), sum(not q.answers for q in questions), notes) == (4719, 348, ())


def test_the_small_split_keeps_whole_articles_apart_and_says_so(data: Path) -> None:
    read = load_squad(data / "squad")
    assert not {q.title for q in read.train} & {q.title for q in read.dev}
    assert not {q.context for q in read.train} & {q.context for q in read.dev}
    assert {q.title for q in read.dev} == {
        "Prime_number", "Rhine", "Scottish_Parliament", "Islamism", "Imperialism", "United_Methodist_Church", "French_and_Indian_War", "Force",
    }  # fmt: skip
    assert len(read.train) == 4371 + 10_570 - len(read.dev)
    assert all(q.answers for q in read.train + read.dev)
    assert read.notes[0].startswith(
        "not the published split: trained on 4371 answerable questions of train-v2.0-10articles.json and the first 40"
    )


def test_the_published_files_are_the_published_split_also_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "train-v1.1.json", _squad(("a", [("cat", 4)]), context="The cat."))
    _write(tmp_path / "train-v2.0-10articles.json", _squad(("c", [("cat", 4)])))
    _write(tmp_path / "dev-v1.1.json", _squad(("b", [("mat", 19), ("the mat", 15)])))
    read = load_squad(tmp_path)
    assert [q.id for q in read.train] == ["a"] and [q.id for q in read.dev] == ["b"]
    assert [(a.text, a.start) for a in read.dev[0].answers] == [("mat", 19), ("the mat", 15)]
    assert read.notes == ("trained on train-v1.1.json, scored on dev-v1.1.json",)
    monkeypatch.setattr(squad, "_PUBLISHED", {(1, 1): "SQuAD 1.1: "})
    assert load_squad(tmp_path).notes == ("SQuAD 1.1: trained on train-v1.1.json, scored on dev-v1.1.json",)


def test_missing_files_and_questions_without_answer_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_squad(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no files with train in the name \(it has no \.json file\); name both: --path=TRAIN"):
        load_squad(tmp_path)
    _write(tmp_path / "dev-v1.1.json", _squad(("b", [("mat", 19)])))
    with pytest.raises(DataError, match=r"no files with train in the name \(it has dev-v1\.1\.json\)"):
        load_squad(tmp_path)
    for name in ("my-train-a.json", "my-train-b.json"):
        _write(tmp_path / name, _squad(("a", [])))
    with pytest.raises(DataError, match=r"2 files with train in the name .it has dev-v1\.1\.json, my-train-a\.json, my-train-b\.json"):
        load_squad(tmp_path)
    with pytest.raises(
        DataError, match=r"my-train-a\.json: 1 of 1 questions have no answer, first a; .* says so, as in SQuAD 2\.0: `is_impossible: true`"
    ):
        load_squad(tmp_path / "my-train-a.json")


def test_half_a_character_is_refused_before_it_is_trained_on_and_costs_its_question_alone_where_it_is_asked(tmp_path: Path) -> None:
    parts = [_squad((f"{i}", [("cat", 4)]), context=f"The cat {i}{chr(0xD83D) * (i == 7)}.")["data"][0] for i in range(60)]
    path = _write(tmp_path / "all.json", {"data": parts})
    with pytest.raises(DataError, match=r"1 of 60 questions, or their context, have half of a surrogate pair, .* first '7'; take it out"):
        load_squad(path)
    assert len(list(question_lines(str(path)) or ())) == 60


def test_questions_that_say_that_they_have_no_answer_are_read_and_no_others(tmp_path: Path) -> None:
    root = _squad(("a", [("cat", 4)]), ("b", []))
    root["data"][0]["paragraphs"][0]["qas"][1] |= {"is_impossible": True, "plausible_answers": [{"text": "mat", "answer_start": 0}]}
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        _write(tmp_path / name, root)
    _write(tmp_path / "devious.json", root)
    read = load_squad(tmp_path)
    assert [(q.id, len(q.answers), q.impossible) for q in read.train + read.dev] == [("a", 1, False), ("b", 0, True)] * 2
    assert read.notes[0] == "trained on train-v2.0.json, scored on dev-v2.0.json"
    for change, message in (
        ({"answers": [{"text": "cat", "answer_start": 4}]}, r"\(question b\): is_impossible is true, and there are answers"),
        ({"is_impossible": 1}, "is_impossible is a number where true or false belongs"),
    ):
        wrong = json.loads(json.dumps(root))
        wrong["data"][0]["paragraphs"][0]["qas"][1] |= change
        with pytest.raises(DataError, match=message):
            read_squad(_write(tmp_path / "wrong.json", wrong))


def test_the_real_files_of_squad_2_are_read_with_their_questions_without_answer(data: Path) -> None:
    read = load_squad(data / "squad" / "train-v2.0-10articles.json", data / "squad" / "cs224n-dev-v2.0.json")
    assert [(len(part), sum(q.impossible for q in part)) for part in (read.train, read.dev)] == [(4719, 348), (6078, 3168)]


def test_files_of_any_name_are_found_or_named_and_never_called_squad(tmp_path: Path) -> None:
    train = _write(tmp_path / "faq_TRAIN_set.json", _squad((7, [("cat", 4)])))
    dev = _write(tmp_path / "faq-valid.json", _squad((8, [("mat", 2)]), context="A mat."))
    for read in (load_squad(tmp_path), load_squad(train, dev), load_squad(tmp_path, dev)):
        assert [q.id for q in read.train] == ["7"] and [q.id for q in read.dev] == ["8"]
        assert read.notes == ("trained on faq_TRAIN_set.json, scored on faq-valid.json",)
    with pytest.raises(DataError, match="too few paragraphs to split off a tenth; name the questions to score on with --dev=FILE"):
        load_squad(train)
    train.rename(tmp_path / "faq_train_set.JSON")
    assert load_squad(tmp_path).notes == ("trained on faq_train_set.JSON, scored on faq-valid.json",)


def test_of_one_file_whole_paragraphs_are_validation(tmp_path: Path) -> None:
    parts = [_squad((f"{i}a", [("cat", 4)]), (f"{i}b", [("cat", 4)]), context=f"The cat {i}.")["data"][0] for i in range(60)]
    read = load_squad(_write(tmp_path / "all.json", {"data": parts}))
    assert not {q.context for q in read.train} & {q.context for q in read.dev} and len(read.train) + len(read.dev) == 120
    assert 1 <= len(read.dev) <= 40 and read.notes[0].startswith(f"scored on {len(read.dev)} questions, those of a tenth of the paragraphs")


def test_a_file_of_questions_becomes_the_lines_to_answer(tmp_path: Path) -> None:
    path = _write(tmp_path / "q.json", _squad((7, []), ("b", [("cat", 99)])))
    lines = question_lines(str(path))
    assert lines is not None and [json.loads(line) for line in lines] == [
        {"id": name, "question": "who?", "context": "The cat sat on the mat."} for name in ("7", "b")
    ]
    for name, text in (("x.json", '{"text": "a"}'), ("y.json", '{"text": "a"}\n{"text": "b"}\n'), ("z.json", '{"data": '), ("q.txt", "{}")):
        (tmp_path / name).write_text(text)
        assert question_lines(str(tmp_path / name)) is None
    assert question_lines("-") is None and question_lines(str(tmp_path / "absent.json")) is None


def test_answers_at_the_wrong_place_are_refused_over_the_limit_and_never_moved_below_it(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.json", _squad(("good", [("cat", 4)]), ("moved", [("cat", 5)]), ("before", [("cat", -3)])))
    with pytest.raises(DataError, match="2 of 3 answers do not stand at their answer_start, first those of questions moved, before"):
        read_squad(path)
    with pytest.raises(DataError, match=r"allow their share: --max_misplaced_answers=0\.667$"):
        read_squad(path, max_misplaced_answers=0.66)
    questions, notes = read_squad(path, max_misplaced_answers=0.667)
    assert [q.answers[0].start for q in questions] == [4, -1, -1] and [q.answers[0].text for q in questions] == ["cat"] * 3
    assert notes == ("x.json: 2 of 3 answers do not stand at their answer_start and are not trained on: moved, before",)


@pytest.mark.parametrize(("start", "what"), [(6, "UTF-16 units"), (8, "bytes of UTF-8")])
def test_positions_that_count_something_else_than_characters_are_recognized(start: int, what: str, tmp_path: Path) -> None:
    context = "\U0001f600 the cat."
    path = _write(tmp_path / "x.json", _squad(("a", [("the", 3 if start == 6 else 5)]), ("b", [("cat", start + 1)]), context=context))
    with pytest.raises(
        DataError, match=f"2 of 2 answers .* count Unicode characters of the context, and these count {what}.*: convert them.$"
    ):
        read_squad(path)
    mixed = _write(tmp_path / "y.json", _squad(("a", [("the", 3 if start == 6 else 5)]), ("b", [("cat", 0)]), context=context))
    with pytest.raises(DataError, match=r"count Unicode characters of the context\.$"):
        read_squad(mixed)


def test_paragraphs_on_both_sides_and_questions_without_text_are_counted(tmp_path: Path) -> None:
    asked, other = _squad(("a", [("cat", 4)]), ("b", [("cat", 4)])), _squad(("c", [("cat", 2)]), context="A cat.")
    asked["data"][0]["paragraphs"][0]["qas"][1]["question"] = " "
    train, dev = _write(tmp_path / "train.json", asked), _write(tmp_path / "dev.json", {"data": asked["data"] + other["data"]})
    assert load_squad(train, dev).notes == (
        "trained on train.json, scored on dev.json",
        "train.json: 1 of 2 questions have no text: b",
        "dev.json: 1 of 3 questions have no text: b",
        "the paragraph of 2 of 3 questions to score on is also trained on, so their score says little about others",
    )
    assert load_squad(_write(tmp_path / "other.json", other), _write(tmp_path / "asked.json", _squad(("a", [("cat", 4)])))).notes[1:] == ()


def _without(key: str) -> dict[str, Any]:
    root = _squad(("a", [("cat", 4)]))
    article = root["data"][0]
    paragraph = article["paragraphs"][0]
    qa = paragraph["qas"][0]
    for node in (root, article, paragraph, qa, qa["answers"][0]):
        node.pop(key, None)
    return root


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], "is a list, and questions in SQuAD's format are an object with the key 'data'; rows of a table are JSON lines"),
        (_without("data"), "the file has no key 'data'"),
        (_without("paragraphs"), r"data\[0\] has no key 'paragraphs'"),
        (_without("context"), r"data\[0\]\.paragraphs\[0\] has no key 'context'"),
        (_without("id"), r"data\[0\]\.paragraphs\[0\]\.qas\[0\] has no key 'id'"),
        (_without("answer_start"), r"qas\[0\] \(question a\) has no key 'answer_start'"),
        ({"data": {}}, r"the file\.data is an object where a list belongs"),
        ({"data": []}, "holds no question"),
        ({"data": ["x"]}, r"data\[0\] is a text, not an object"),
        (_squad(("a", []), ("a", [])), "question id 'a' is used twice"),
        (_squad(("a", [(" ", 3)])), "an answer has no text"),
        (_squad((1, []), ("1", [])), "question id '1' is used twice"),
        (_squad((True, [])), r"qas\[0\]\.id is true or false where a text belongs"),
        (_squad(("a", [("T", False)])), r"qas\[0\] \(question a\)\.answer_start is true or false where a whole number belongs"),
        (_squad(("a", [("cat", 4.0)])), r"qas\[0\] \(question a\)\.answer_start is the number 4\.0 where a whole number belongs"),
    ],
)
def test_json_that_is_not_squad_is_refused_with_its_place(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_squad(_write(tmp_path / "x.json", value))


@pytest.mark.parametrize("context", ["", " \n"])
def test_questions_about_nothing_are_counted_and_named(context: str, tmp_path: Path) -> None:
    tree = _squad(("a", [("cat", 4)]))
    none = {"id": "b", "question": "who?", "answers": [], "is_impossible": True}
    tree["data"][0]["paragraphs"].append({"context": context, "qas": [none, {**none, "id": "c"}]})
    good = _write(tmp_path / "good.json", _squad(("a", [("cat", 4)])))
    bad = _write(tmp_path / "bad.json", tree)
    for train, dev in ((bad, good), (good, bad)):
        with pytest.raises(DataError, match=r"bad\.json: 2 of 3 questions have an empty context, first b, c; .* take them out"):
            load_squad(train, dev)


def test_a_file_cut_short_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(_squad(("a", [("cat", 4)])))[:-20])
    with pytest.raises(DataError, match=r"x\.json: is not JSON: .*cut short"):
        read_squad(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_squad(tmp_path / "y.json")


def test_questions_to_predict_on_need_no_answers(tmp_path: Path) -> None:
    root = _squad(("a", []))
    del root["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    assert read_squad(_write(tmp_path / "x.json", root))[0][0].answers == ()
