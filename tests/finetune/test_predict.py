"""Answers come in the order of the lines, in every form that a line may have, and a bad line is named."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import random
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from overnight import config
from overnight.cli.main import main
from overnight.config import Run
from overnight.console import Line
from overnight.errors import DataError
from overnight.finetune.answer_files import write_answers
from overnight.finetune.finetune import finetune
from overnight.finetune.predict import answer_file, answer_rows, load_trained, predict, read_row, write_question_files
from overnight.tasks import inputs as module
from overnight.tasks.inputs import read_lines
from overnight.tasks.line_fields import sentence_of


@pytest.fixture(scope="module")
def run(pretrained: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a classification, a regression and a question task, each barely trained."""
    folder = tmp_path_factory.mktemp("predict")
    shutil.copytree(pretrained.run_dir, folder / "run")
    words = [("integer division", "number"), ("string literal", "text"), ("raised exception", "error")]
    (folder / "classes.csv").write_text("text,label\n" + "".join(f"{w} {i},{label}\n" for i in range(12) for w, label in words))
    (folder / "scores.csv").write_text("text,other,score\n" + "".join(f"class {i},object {i},{i / 10}\n" for i in range(40)))
    squad = folder / "squad"
    squad.mkdir()
    for name in ("train", "dev"):
        context = f"The {name} value is number seven."
        qas = [
            {"id": f"{name}{i}", "question": "What is it?", "answers": [{"text": "seven", "answer_start": context.index("seven")}]}
            for i in range(8)
        ]
        (squad / f"{name}-v1.1.json").write_text(json.dumps({"data": [{"title": name, "paragraphs": [{"context": context, "qas": qas}]}]}))
    spec = {"epochs": 2, "global_batch_size": 8, "micro_batch_size": 8, "lr": 3e-3, "seq_len": 32}
    tree = config.to_tree(pretrained)
    tree["finetune"] = {
        "classes": {**spec, "task": "csv", "path": str(folder / "classes.csv")},
        "scores": {**spec, "task": "csv", "path": str(folder / "scores.csv"), "columns": {"text_b": "other"}},
        "squad": {**spec, "doc_stride": 8, "task": "squad", "path": str(squad)},
    }
    result = dataclasses.replace(config.build_run(tree), out=str(folder / "run"))
    for name in result.finetune:
        finetune(result, name, Line(io.StringIO()))
    return result


def answers(run: Run, name: str, *lines: str) -> list[dict[str, Any]]:
    return list(predict(run, name, lines))


def of_file(run: Run, name: str, path: str, form: str = "") -> Iterator[dict[str, Any]]:
    return answer_file(load_trained(run, name), path, form)


def test_plain_lines_and_json_are_answered_alike(run: Run) -> None:
    plain, spaced, named = answers(
        run, "classes", "a string literal\n", "\n", "   a string literal  ", '{"id": "x", "text": "a string literal"}'
    )
    assert plain["label"] in ("number", "text", "error")
    assert list(plain["probabilities"]) == ["error", "number", "text"]
    assert sum(plain["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    assert max(plain["probabilities"], key=plain["probabilities"].get) == plain["label"]
    assert plain["probabilities"] == spaced["probabilities"] == named["probabilities"]
    assert [plain["id"], spaced["id"], named["id"]] == ["1", "3", "x"]


def test_a_pair_is_two_columns_or_two_keys(run: Run) -> None:
    tab, keys, other = answers(
        run, "scores", "class 3\tobject 3", '{"text_a": "class 3", "text_b": "object 3"}', "class 3 object 3\tclass 9"
    )
    assert tab["score"] == keys["score"] != other["score"]
    assert set(tab) == {"id", "score"}


@pytest.mark.parametrize("name", ["classes", "squad"])
def test_an_id_is_a_text_or_a_number_and_null_is_none(name: str, run: Run) -> None:
    fields = {"text": "a string", "question": "What?", "context": "This value."}
    lines = [json.dumps({"id": row_id, **fields}) for row_id in (None, 7, "x", True, {"a": 1})]
    found = list(module.answered(enumerate(lines, 1), *_reader_of(run, name), keep_going=True))
    assert [answer["id"] for answer in found] == ["1", "7", "x", "4", "5"]
    assert [answer.get("error", "") for answer in found] == [
        "",
        "",
        "",
        *(f"line {n}: its id is {kind}; it needs a text or a number" for n, kind in ((4, "true or false"), (5, "an object"))),
    ]


def _reader_of(run: Run, name: str) -> tuple[Any, Any]:
    model = load_trained(run, name)  # type: ignore[arg-type]
    return functools.partial(read_row, model), functools.partial(answer_rows, model)


def test_a_tab_is_of_the_text_where_the_task_has_no_pairs(run: Run) -> None:
    tab, json_text, first = answers(
        run, "classes", "integer division\tstring literal", '{"text": "integer division\\tstring literal"}', "integer division"
    )
    assert tab["probabilities"] == json_text["probabilities"] != first["probabilities"]
    for line in ('{"text_a": "integer division", "text_b": "string literal"}', '{"text": "integer division", "text_b": ""}'):
        with pytest.raises(DataError, match="line 1: is a pair; the task is of single texts: give it as one, `text`"):
            answers(run, "classes", line)


def test_a_pair_is_read_from_the_columns_that_were_trained_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = json.loads((run.run_dir / "finetune" / "scores" / "task.json").read_text())
    assert facts["columns"] == ["text", "other"] and facts["pairs"]
    wanted = answers(run, "scores", "class 3\tobject 3")[0]["score"]
    (tmp_path / "pair.csv").write_text("text,other\nclass 3,object 3\nclass 3,\n")
    pair, lacking = of_file(run, "scores", str(tmp_path / "pair.csv"))
    assert pair["score"] == wanted and "has no second text" in lacking["error"]
    (tmp_path / "pair.jsonl").write_text('{"text": "class 3", "text_b": "object 3"}\n{"text": "class 3"}\n')
    stored = list(of_file(run, "scores", str(tmp_path / "pair.jsonl")))
    stdin(monkeypatch, (tmp_path / "pair.jsonl").read_bytes())
    piped = list(of_file(run, "scores", "-"))
    assert (stored[0], piped[0]) == ({"id": "0", "score": wanted}, {"id": "1", "score": wanted})  # of a table a row, else a line
    assert "error" in stored[1] and "error" in piped[1]
    with pytest.raises(DataError, match=r"has the columns text; the texts of a row belong in `text` and `other`$"):
        (tmp_path / "one.csv").write_text("text\nclass 3\n")
        list(of_file(run, "scores", str(tmp_path / "one.csv")))


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_a_table_is_answered_by_its_columns_and_not_as_lines(ending: str, run: Run, tmp_path: Path) -> None:
    rows = [{"label": "number", "id": "x", "text": "integer division"}, {"label": "text", "id": "", "text": 'a "string", literal'}]
    path = tmp_path / f"in{ending}"
    if ending == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif ending == ".tsv":
        path.write_text("label\tid\ttext\n" + "".join("\t".join(row.values()) + "\n" for row in rows))
    else:
        path.write_text('label,id,text\nnumber,x,integer division\ntext,,"a ""string"", literal"\n')
    found = list(of_file(run, "classes", str(path)))
    assert [a["id"] for a in found] == ["x", "1"]
    alone = answers(run, "classes", *(row["text"] for row in rows))
    assert [a["probabilities"] for a in found] == [a["probabilities"] for a in alone]


def test_a_table_of_pairs_and_one_of_questions_are_answered(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("text_a,text_b,score\nclass 3,object 3,0.3\n")
    (pair,) = of_file(run, "scores", str(tmp_path / "pairs.csv"))
    assert pair["score"] == answers(run, "scores", "class 3\tobject 3")[0]["score"]
    (tmp_path / "asked.csv").write_text("id,question,context\nq,What is the value?,The value is nine.\n")
    (answer,) = of_file(run, "squad", str(tmp_path / "asked.csv"))
    assert answer == answers(run, "squad", '{"id": "q", "question": "What is the value?", "context": "The value is nine."}')[0]
    (tmp_path / "masks.csv").write_text("text\nThe [MASK] of an object.\n")
    (filled,) = of_file(run, "mask", str(tmp_path / "masks.csv"))
    assert filled["text"] == "The [MASK] of an object."


def test_the_order_of_the_lines_is_kept_over_parts_and_lengths(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 7)
    texts = [" ".join(["object"] * n) for n in range(1, 21)]
    random.Random(0).shuffle(texts)
    together = answers(run, "classes", *texts)
    assert [a["id"] for a in together] == [str(i) for i in range(1, 21)]
    for text, answer in zip(texts, together, strict=True):
        (alone,) = answers(run, "classes", text)
        assert alone["probabilities"] == pytest.approx(answer["probabilities"], abs=1e-4)


def test_answers_to_a_table_that_never_ends_begin_with_its_first_rows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), open(writing, "wb", buffering=0) as file:
            file.write(b"text,label\n")
            while True:
                file.write(b'an integer,number\n"no end,text\na string,text\n' * 9)

    writer = threading.Thread(target=write)
    writer.start()
    with open(reading, "rb") as file:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        found = list(itertools.islice(of_file(run, "classes", "-", form="csv"), 30))
    writer.join()
    assert [a["id"] for a in found] == [str(n) for n in range(30)]
    assert [a.get("label") is None for a in found] == [False, True, False] * 10 and "written twice" in found[1]["error"]
    alone = answers(run, "classes", "an integer", "a string")
    for place in (0, 2):
        assert found[place]["probabilities"] == pytest.approx(alone[place // 2]["probabilities"], abs=1e-4)


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "parquet"])
def test_a_row_that_cannot_be_used_has_an_error_in_its_place(
    form: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {"a": "an integer", "b": "", "c": "a string"}
    path = tmp_path / f"in.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"id": list(texts), "text": list(texts.values())}), path)
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in texts.items()) + '{"text": "cut\n["a"]\n')
    else:
        mark = "," if form == "csv" else "\t"
        path.write_text("".join(f"{i}{mark}{text}\n" for i, text in {"id": "text", **texts}.items()) + "only one\n")
    found = list(of_file(run, "classes", str(path)))
    assert [a["id"] for a in found[:3]] == list(texts) and ["error" in a for a in found[:3]] == [False, True, False]
    more = {"jsonl": [("3", "is not JSON"), ("4", "is a list")], "parquet": []}.get(form, [("3", "1")])
    assert [(a["id"], why in a["error"]) for a, (_, why) in zip(found[3:], more, strict=True)] == [(i, True) for i, _ in more]
    assert main(["predict", "classes", "--from", str(run.run_dir), "--input", str(path), "--to", str(tmp_path / "out.jsonl")]) == 1
    assert f"{1 + len(more)} line" in capsys.readouterr().err
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == found


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ("csv", b"id,text\na,an integer\ncaf\xe9,a string\nc,an object\n"),
        ("jsonl", b'{"id": "a", "text": "an integer"}\n{"id": "\\ud83d", "text": "a string"}\n{"\\ud83d": 1}\n'),
    ],
)
def test_an_id_or_a_column_that_is_no_text_costs_its_row_alone(form: str, content: bytes, run: Run, tmp_path: Path) -> None:
    path = tmp_path / f"in.{form}"
    path.write_bytes(content)
    found = list(of_file(run, "classes", str(path)))
    assert write_answers(found, tmp_path / "out.jsonl") == {"csv": 1, "jsonl": 2}[form]
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()] == found
    assert found[0]["id"] == "a" and "label" in found[0]
    assert found[1]["id"] == "1" and "its id is no text" in found[1]["error"]


def test_questions_are_answered_from_their_context(run: Run) -> None:
    context = "The value is number nine. " + "Every class has a method. " * 10
    asked = [json.dumps({"id": i, "question": "What is the value?", "context": context}) for i in ("b", "a")]
    first, second, plain = answers(run, "squad", *asked, f"What is the value?\t{context}")
    assert (first["id"], second["id"], plain["id"]) == ("b", "a", "3")
    assert first["answer"] and first["answer"] in context
    assert first["answer"] == second["answer"] == plain["answer"] and 0 < first["probability"] <= 1
    assert all(context[one["start"] : one["end"]] == one["answer"] for one in (first, second, plain)), "also where it stands there twice"


@pytest.mark.parametrize("name", ["asked.jsonl", "asked.csv"])
def test_where_an_answer_stands_counts_from_the_first_character_of_the_context_as_given(name: str, run: Run, tmp_path: Path) -> None:
    context = "\n  The value is number nine. "
    row = json.dumps({"question": "What is the value?", "context": context})
    (tmp_path / name).write_text(row if name.endswith("l") else f'question,context\nWhat is the value?,"{context}"\n')
    (answer,) = of_file(run, "squad", str(tmp_path / name))
    assert answer["answer"] and context[answer["start"] : answer["end"]] == answer["answer"]


def test_answers_go_to_a_file_in_the_form_that_fits(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = answers(run, "squad", '{"id": "é", "question": "What?", "context": "This value."}')
    write_answers(given, tmp_path / "predictions.json")
    assert json.loads((tmp_path / "predictions.json").read_text()) == {"é": given[0]["answer"]}
    write_answers(given, tmp_path / "predictions.jsonl")
    assert [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text(encoding="utf-8").splitlines()] == given
    assert capsys.readouterr().out.count("(1 answer)") == 2
    write_answers(given, None)
    assert json.loads(capsys.readouterr().out) == given[0]


def test_two_questions_of_one_id_are_refused_where_a_file_would_lose_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 7, "question": "What?", "context": "A value."}\n' * 2)
    with pytest.raises(DataError, match="several questions have the id '7'"):
        write_answers(of_file(run, "squad", str(tmp_path / "in.jsonl")), tmp_path / "out.json")
    with pytest.raises(DataError, match="several questions have the id '7'"):
        write_question_files(load_trained(run, "squad"), str(tmp_path / "in.jsonl"), tmp_path / "out")
    with pytest.raises(DataError, match="only answers to questions are several files"):
        write_question_files(load_trained(run, "classes"), str(tmp_path / "in.jsonl"), tmp_path / "out")
    assert not [*tmp_path.glob("out*")]


def test_a_question_that_leaves_no_room_for_its_context_costs_its_line_alone(run: Run) -> None:
    lines = [
        json.dumps({"id": name, "question": "integer " * n, "context": "The value."}) for name, n in (("a", 2), ("long", 40), ("c", 3))
    ]
    first, long, last = module.answered(enumerate(lines, 1), *_reader_of(run, "squad"), keep_going=True)
    assert first["answer"] and last["answer"] and long["id"] == "long"
    assert re.fullmatch(r"line 2: its question of \d+ tokens leaves no room for the paragraph; the task takes up to 28", long["error"])


def test_a_question_whose_context_is_empty_costs_its_line_alone(run: Run) -> None:
    lines = [json.dumps({"id": name, "question": "What?", "context": text}) for name, text in (("a", "The value."), ("empty", " \n"))]
    answer, error = module.answered(enumerate(lines, 1), *_reader_of(run, "squad"), keep_going=True)
    assert answer["answer"] and error == {"id": "empty", "error": "line 2: its context is empty: there is nothing to find an answer in"}
    with pytest.raises(DataError, match="line 2: its context is empty"):
        list(predict(run, "squad", lines))


def test_masks_are_filled_with_pieces_and_their_probabilities(run: Run) -> None:
    one, two = answers(run, "mask", "The [MASK] of an object.", '{"text": "A [MASK] is a [MASK]."}')
    assert one["text"] == "The [MASK] of an object." and len(one["masks"]) == 1 and len(two["masks"]) == 2
    for guesses in [*one["masks"], *two["masks"]]:
        assert len(guesses) == 5
        shares = [guess["probability"] for guess in guesses]
        assert shares == sorted(shares, reverse=True) and all(0 < p < 1 for p in shares)
        assert all(isinstance(guess["token"], str) and guess["token"] for guess in guesses)


@pytest.mark.parametrize(
    ("task", "line", "message"),
    [
        ("classes", '{"text": "cut', "line 2: is not JSON"),
        ("classes", '{"words": "a"}', "line 2: has the keys words; it needs `text`, or `text_a` and `text_b`"),
        ("classes", '{"text": null}', "line 2: its `text` is null; it needs `text`, or .* as strings"),
        ("classes", "{}", "line 2: has no keys; it needs `text`"),
        ("classes", '[{"text": "a"}, {"text": "b"}]', "line 2: is a list; give each of its objects a line of its own"),
        ("scores", '{"text_a": "a", "text_b": 1}', "line 2: its `text_b` is a number; .* as strings"),
        ("scores", "one text", "line 2: has no second text, and the task is of pairs"),
        ("scores", "a\t", "line 2: has no second text"),
        ("scores", "\tpair", "line 2: has no first text, and the task is of pairs"),
        ("scores", '{"text_a": "", "text_b": "pair"}', "line 2: has no first text"),
        ("squad", '{"question": "What?"}', "line 2: .* needs `question` and `context`"),
        ("squad", '{"question": "What?", "context": ["a"]}', "line 2: its `context` is a list; it needs `question` and `context`"),
        ("squad", "only a question", "line 2: has no text that answers; a question and that text have a tab between them"),
        ("mask", "nothing to fill in", r"line 2: no \[MASK\]"),
        ("mask", "object " * 60 + "[MASK]", r"line 2: no \[MASK\] within the first 48 tokens"),
        ("mask", "a [MASK] " + "object " * 60 + "[MASK] and [MASK]", r"line 2: 2 of its 3 \[MASK\] come after the first 48 tokens"),
        ("mask", "a [MASK]\tpair", "line 2: is a pair"),
    ],
)
def test_a_bad_line_is_named_by_its_number(task: str, line: str, message: str, run: Run) -> None:
    good = {"squad": "What?\tThis.", "mask": "A [MASK].", "scores": "a\tpair"}.get(task, "some text")
    with pytest.raises(DataError, match=message):
        answers(run, task, good, line)


def test_a_text_that_only_looks_like_a_list_is_a_text(run: Run) -> None:
    assert [answer["id"] for answer in answers(run, "classes", "[{ some text", "[1, 2]")] == ["1", "2"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": ["a", ""]}, "line 7: its `tokens` hold a word that is empty or no text"),
        ({"tokens": []}, "line 7: its `tokens` hold no word"),
        ({"tokens": 5}, "line 7: its `tokens` is a number; it needs `tokens`, a list of words, or `text`"),
    ],
)
def test_words_that_cannot_be_tagged_are_refused_by_what_is_wrong_with_them(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        sentence_of(7, fields)


def test_an_unknown_task_lists_what_there_is(run: Run) -> None:
    with pytest.raises(
        DataError, match=r"'sst2' \(it has: classes, scores, squad\); run `overnight finetune sst2` first, or ask for `mask`"
    ):
        answers(run, "sst2", "text")


def test_without_a_checkpoint_the_mask_says_what_to_do(run: Run, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no checkpoint; run `overnight pretrain` first"):
        answers(dataclasses.replace(run, out=str(tmp_path)), "mask", "[MASK]")


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lines_come_from_a_file_or_standard_input(mark: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = mark + "é one\r\ntwo\u2028still two\n\nfour".encode()
    (tmp_path / "lines").write_bytes(content)
    stdin(monkeypatch, content)
    expected = ["é one\r\n", "two\u2028still two\n", "\n", "four"]
    assert list(read_lines(str(tmp_path / "lines"))) == list(read_lines("-")) == expected


def test_what_is_no_text_is_named_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines").write_bytes(b"good\nbad \xff\n")
    with pytest.raises(DataError, match=r"lines: line 2: is not UTF-8 \(invalid start byte at byte 4\)"):
        list(read_lines(str(tmp_path / "lines")))
    stdin(monkeypatch, b"\xff")
    with pytest.raises(DataError, match="standard input: line 1: is not UTF-8"):
        list(read_lines("-"))
    with pytest.raises(DataError, match="No such file"):
        list(read_lines(str(tmp_path / "absent")))
    with pytest.raises(DataError, match="directory"):
        list(read_lines(str(tmp_path)))
