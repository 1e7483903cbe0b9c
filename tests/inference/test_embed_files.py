"""`overnight embed` and `predict` keep the order of their lines, go on behind a broken one, and need no more memory for more lines."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import overnight
from overnight.cli.main import main
from overnight.config import BertRun
from overnight.inference import embed_files as module
from overnight.inference.embed_files import embed_files, write_embeddings
from overnight.tasks import inputs

Captured = pytest.CaptureFixture[str]
LINES = b'An integer.\n{"id": "b", "text": "a\\tb"}\n{"text": "cut\n\nbad \xff\n{"text": "\\ud800"}\n{"words": 1, "id": 7}\na\tb\n'
ERRORS = {2: ("3", "is not JSON"), 4: ("5", "is not UTF-8"), 5: ("6", "half of a surrogate"), 6: ("7", "has the keys words, id")}


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_broken_line_has_an_error_in_its_place_and_the_others_their_vectors(
    trained_run: BertRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    expected = overnight.load(trained_run.run_dir).embed(["An integer.", "a\tb", "", "a\tb"])
    stdin(monkeypatch, LINES)
    source = str(trained_run.run_dir)
    assert main(["embed", "--from", source, "-"]) == 1
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert "4 lines of 8 could not be embedded" in printed.err
    for place, (row_id, error) in ERRORS.items():
        assert found[place]["id"] == row_id and error in found[place]["error"]
    good = [found[place] for place in range(8) if place not in ERRORS]
    assert [one["id"] for one in good] == ["1", "b", "4", "8"]
    np.testing.assert_allclose([one["embedding"] for one in good], expected, atol=1e-6)
    (tmp_path / "in.jsonl").write_bytes(LINES)
    assert main(["embed", "--from", source, str(tmp_path / "in.jsonl"), "--to", str(tmp_path / "out.npy")]) == 1
    rows = np.load(tmp_path / "out.npy")
    assert rows.dtype == np.float32 and np.flatnonzero(np.isnan(rows).all(1)).tolist() == list(ERRORS)
    assert np.array_equal(rows[[0, 1, 3, 7]], np.array([one["embedding"] for one in good], np.float32))
    assert f"{tmp_path / 'in.jsonl'}: line 5: is not UTF-8" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_predict_goes_on_behind_a_broken_line(trained_run: BertRun, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    stdin(monkeypatch, LINES)
    assert main(["predict", "classes", "--from", str(trained_run.run_dir)]) == 1
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [one["id"] for one in found] == ["1", "b", "3", "5", "6", "7", "8"]
    assert ["error" in one for one in found] == [False, False, True, True, True, True, False]
    assert "4 lines could not be answered" in printed.err
    stdin(monkeypatch, b"no mask\nA [MASK].\n")
    assert main(["predict", "mask", "--from", str(trained_run.run_dir)]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert "no [MASK]" in first["error"] and len(second["masks"]) == 1


def test_tables_and_several_files_are_embedded_one_after_another(trained_run: BertRun, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a.csv").write_text("id,text\nx,one\ny,two\n")
    (tmp_path / "b.txt").write_text("three\n")
    task = str(trained_run.run_dir / "finetune" / "classes")
    where = [str(tmp_path / "a.csv"), str(tmp_path / "b.txt")]
    assert main(["embed", "--from", task, *where, "--normalize", "--layer=0", "--pooling=first", "--precision", "fp32"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["id"], one["file"]) for one in found] == [("x", where[0]), ("y", where[0]), ("1", where[1])]
    expected = overnight.load(task).embed(["one", "two", "three"], "first", 0, True)
    np.testing.assert_allclose([one["embedding"] for one in found], expected, atol=1e-6)


@pytest.mark.parametrize(("name", "content"), [("in.csv", "id,text\nx,\ny,two\n"), ("in.tsv", "id\ttext\nx\t\ny\ttwo\n")])
def test_an_empty_cell_is_an_empty_text_as_an_empty_line_is(
    name: str, content: str, trained_run: BertRun, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["embed", "--from", str(trained_run.run_dir), str(tmp_path / name)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose([one["embedding"] for one in found], overnight.load(trained_run.run_dir).embed(["", "two"]), atol=1e-6)


def test_lines_without_end_are_embedded_while_only_some_are_held(trained_run: BertRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_MOST", 8)
    read = 0

    def endless(path: str) -> Iterator[str]:
        nonlocal read
        for read in itertools.count(1):
            yield f"object {read}\n"

    monkeypatch.setattr(inputs, "text_lines", endless)
    found = embed_files(overnight.load(trained_run.run_dir), ["-"], "mean", -1, False)
    assert [one.id for one in itertools.islice(found, 9)] == [str(n) for n in range(1, 10)] and read == 16


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
def test_what_ends_on_the_way_leaves_no_file(name: str, trained_run: BertRun, tmp_path: Path) -> None:
    def ends() -> Iterator[module.Embedded]:
        yield module.Embedded("1", "-", np.zeros(4, np.float32))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_embeddings(ends(), tmp_path / name, 4, False)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_embedded_is_refused_before_anything_is_written(trained_run: BertRun, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "in.txt").write_text("one\n")
    source, text = str(trained_run.run_dir), str(tmp_path / "in.txt")
    for words, message in (
        (["--to", str(tmp_path)], "is a folder; name a file"),
        (["--to", "x.csv"], "is neither .npy nor .jsonl"),
        (["--layer", "9"], "layer = 9: must be from 0"),
        (["--seed=1"], "takes only run-level keys"),
    ):
        assert main(["embed", "--from", source, text, *words]) == 2
        assert message in capsys.readouterr().err
    assert main(["embed", "--from", source, str(tmp_path / "absent.txt"), "--to", str(tmp_path / "o.npy")]) == 1
    assert "cannot be read: No such file" in capsys.readouterr().err and not (tmp_path / "o.npy").exists()
