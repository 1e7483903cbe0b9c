"""Answers go where they are told to, in the form that fits, and what stands in their place is named."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from overnight.cli.main import main
from overnight.finetune.answer_files import check_output, write_answers


def test_answers_through_a_pipe_have_nothing_said_between_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_answers([{"id": "1", "label": "a"}], pipe)
    reader.join(60)
    assert read == ['{"id": "1", "label": "a"}\n'] and capsys.readouterr().out == "" and pipe.is_fifo()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_answers_are_json_whatever_the_encoding_of_standard_output(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"id": "é", "text": "中 \U0001f600"}
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", out)
    write_answers([answer], None)
    found = out.buffer.getvalue()  # type: ignore[attr-defined]
    assert json.loads(found) == answer and (b"\\" not in found) is (encoding == "utf-8")


@pytest.mark.parametrize("name", ["answers.csv", "answers.TSV", "answers.parquet"])
def test_answers_are_not_called_a_table(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "classes", "--from", "nothing", "--to", str(tmp_path / name)]) == 2
    assert f"{name}: answers are lines of JSON, not a table; name a file such as answers.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["answers.jsonl.gz", "answers.json.BZ2", "answers.xz", "answers.jsonl.zst"])
def test_answers_are_not_called_compressed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "classes", "--from", "nothing", "--to", str(tmp_path / name)]) == 2
    assert f"{name}: answers are not compressed; name a file such as answers.jsonl, or print them into a pipe" in capsys.readouterr().err


def test_a_hyphen_is_standard_output_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_answers([{"id": "1", "label": "a"}], check_output("-"))
    assert capsys.readouterr().out == '{"id": "1", "label": "a"}\n' and not list(tmp_path.iterdir())


def test_a_question_that_is_an_error_leaves_the_file_in_the_form_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        {"id": "a", "answer": "one", "probability": 0.5},
        {"id": "b", "error": "no room"},
        {"id": "c", "answer": "", "probability": 1.0},
    ]
    assert write_answers(given, tmp_path / "out.json") == 1
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": "one", "c": ""}
    said = capsys.readouterr()
    assert said.err == "b: no room\n" and "(2 answers)" in said.out
