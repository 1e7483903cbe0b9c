"""The validation and test documents of a corpus is logged, named, and warned of where it is too small."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from overnight.config import Data
from overnight.config.data import TextSource
from overnight.corpus import validation_split
from overnight.corpus.pipeline import prepare
from overnight.corpus.readers import documents, start_reading
from overnight.corpus.shards import load_manifest, open_shards
from overnight.errors import DataError
from overnight.state_files import SEAL

_WORDS = ["lake", "stone", "bird", "night", "house", "river", "cloud", "snow"]


def data(folder: Path, fraction: float, **changes: object) -> Data:
    settings = {"documents": "line", "min_chars": 0, "valid_fraction": fraction, "workers": 1, "tokenizer": "bytes"} | changes
    return Data(**{"paths": [str(folder)], **settings})  # type: ignore[arg-type]


def write(folder: Path, count: int, words: int = 20) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(2):
        lines = [" ".join(rng.choice(_WORDS, words)) for _ in range(count // 2)]
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_few_validation_documents_are_warned_of_with_a_share_that_takes_more(tmp_path: Path) -> None:
    text, lines = write(tmp_path / "text", 200), list[str]()
    manifest = prepare(data(text, 0.008), tmp_path / "out", lines.append)
    assert 0 < manifest.count("valid", "documents") < 5
    (warning,) = (line for line in lines if line.startswith("warning:"))
    share = float(warning.split("--data.valid_fraction=")[1].split()[0])
    more = prepare(data(text, share), tmp_path / "more", lines.append)
    assert validation_split.LEAST_DOCUMENTS - 1 <= more.count("valid", "documents") <= validation_split.LEAST_DOCUMENTS + 3


@given(nearest=st.floats(0, 0.999999))
@example(nearest=0.29)
def test_the_advised_share_takes_the_first_document_or_none_is_advised(nearest: float) -> None:
    with pytest.raises(DataError, match=r"^data\.valid_fraction = 1e-09 selects none of 24 documents for validation; ") as error:
        validation_split.check_share("data.valid_fraction", 1e-9, 0, 24, nearest, lambda: True)
    advised = re.search(
        r"use at least (\S+) \(0 turns validation off\), or make more documents with --data\.documents=paragraph --data\.min_chars=1$",
        str(error.value),
    )
    if advised:
        assert nearest < float(advised[1]) <= max(1.11 * nearest, 1.2e-6) and float(advised[1]) <= 0.5
    else:
        assert nearest >= 0.49 and "set it to 0 to turn validation off" in str(error.value)


def test_a_share_that_cannot_leave_a_document_to_train_on_is_not_advised() -> None:
    for fraction, taken, trained in ((0.1, 0, 1), (0.5, 3, 0)):
        with pytest.raises(DataError) as error:
            validation_split.check_share("data.test_fraction", fraction, taken, trained, 0.2, lambda: True)
        assert "use at least" not in str(error.value) and "the test off" in str(error.value)
    validation_split.check_share("data.test_fraction", 0.0, 0, 1, 0.2, lambda: True)


@pytest.mark.parametrize("count", range(20, 60, 4))
def test_the_share_that_is_advised_is_above_that_which_took_too_few(tmp_path: Path, count: int) -> None:
    lines = list[str]()
    prepare(data(write(tmp_path / "text", count), 0.2), tmp_path / "out", lines.append)
    for warning in (line for line in lines if "would take about" in line):
        assert 0.2 < float(warning.split("--data.valid_fraction=")[1].split()[0]) <= 0.5


def test_what_cannot_help_is_not_advised(tmp_path: Path) -> None:
    for name, text, split in (("lines", "{0}", "line"), ("rows", '{{"text": "{0}"}}', "file")):
        lines = list[str]()
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"a.{'jsonl' if name == 'rows' else 'txt'}").write_text("".join(text.format(f"line {i} of it") + "\n" for i in range(8)))
        prepare(data(folder, 0.5, documents=split), tmp_path / f"{name}-out", lines.append)
        (warning,) = (line for line in lines if line.startswith("warning: scores on"))
        assert warning.endswith("tokens would be better): add text")
        with pytest.raises(DataError, match=r"none of 8 documents .*, or add documents$"):
            prepare(data(folder, 1e-9, documents=split), tmp_path / f"{name}-none", lambda _: None)


def test_three_files_are_not_advised_a_share_but_more_documents(tmp_path: Path) -> None:
    lines = list[str]()
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"some text {number}\n\nand more of it\n")
    prepare(data(folder, 0.0, documents="file"), tmp_path / "none", lines.append)
    prepare(data(folder, 0.5, documents="file"), tmp_path / "half", lines.append)
    none, few = (line for line in lines if line.startswith("warning: no document") or line.startswith("warning: scores"))
    assert re.search(r"--data.valid_fraction=0\.\d+$", none)
    assert few.endswith("add text; or make more documents of it (data.documents = paragraph or line)")


def test_dropped_documents_decide_no_advised_share(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = [bytes([place]) + bytes(15) for place in (0, 64, 128, 255)]
    monkeypatch.setattr(validation_split, "read_table", lambda path: pa.record_batch({"hash": hashes}))
    (split,), places = validation_split.sides([Path("a")], np.array([False, True, True, False]), 1e-6, 0.0)
    assert split.tolist() == [0, 1, 1, 0] and places == (0.25, 0.5)


def test_few_validation_tokens_are_warned_of_and_enough_are_not(tmp_path: Path) -> None:
    for words, warns in ((20, True), (400, False)):
        lines: list[str] = []
        manifest = prepare(data(write(tmp_path / f"{words}", 200, words), 0.2), tmp_path / f"out-{words}", lines.append)
        assert (manifest.count("valid", "tokens") < validation_split.LEAST_TOKENS) is warns
        assert any("raise data.valid_fraction above 0.2" in line for line in lines) is warns


def test_a_source_without_a_validation_document_is_warned_of_by_name(tmp_path: Path) -> None:
    lines = list[str]()
    book, rows = (write(tmp_path / name, count) for name, count in (("books", 2), ("rows", 400)))
    sources = {"books": TextSource(paths=[str(book)], documents="file"), "rows": TextSource(paths=[str(rows)])}
    prepare(data(book, 0.1, paths=[], sources=sources), tmp_path / "out", lines.append)
    (warning,) = (line for line in lines if line.startswith("warning: none"))
    assert warning.startswith("warning: none of the 2 documents of source books is in the validation split")
    assert "raise data.valid_fraction = 0.1, or make more documents of it (data.sources.books.documents = paragraph or line)" in warning


def test_no_validation_document_is_warned_of_with_a_way_out(tmp_path: Path) -> None:
    lines: list[str] = []
    prepare(data(write(tmp_path / "text", 200), 0.0), tmp_path / "out", lines.append)
    assert any(
        "no document is in the validation split (data.valid_fraction = 0)" in line and "--data.valid_fraction=0." in line for line in lines
    )


def test_the_manifest_names_the_validation_documents_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, settings = write(tmp_path / "text", 200), data(tmp_path / "text", 0.1, test_fraction=0.1)
    lines: list[str] = []
    prepare(settings, tmp_path / "out", lines.append)
    by_name = {document.name: document.text for document in documents(settings, start_reading(settings))}
    assert list(by_name)[:2] == [f"{text}/0.txt#1", f"{text}/0.txt#2"]
    for split in ("valid", "test"):
        (shard,) = open_shards(tmp_path / "out", split)
        starts = shard.sentence_starts
        held = [shard.tokens[a:b].tobytes().decode().strip() for a, b in pairwise(starts)]
        assert [by_name[name] for name in load_manifest(tmp_path / "out").first_documents[split]] == held
    first = load_manifest(tmp_path / "out").first_documents["valid"]
    assert any(line.startswith(f"validation: {len(first)} documents") and ", ".join(first[:3]) in line for line in lines)
    monkeypatch.setattr(validation_split, "NAMES", 2)
    assert prepare(settings, tmp_path / "few", lines.append).first_documents["valid"] == first[:2]


def test_a_file_that_is_one_document_is_named_without_a_number(tmp_path: Path) -> None:
    text = write(tmp_path / "text", 4)
    settings = data(text, 0.0, documents="file")
    assert [document.name for document in documents(settings, start_reading(settings))] == [f"{text}/0.txt", f"{text}/1.txt"]


def test_a_manifest_of_before_names_no_documents(tmp_path: Path) -> None:
    prepare(data(write(tmp_path / "text", 200), 0.1), tmp_path / "out", lambda _: None)
    path = tmp_path / "out/manifest.json"
    tree = json.loads(path.read_text())
    del tree["first_documents"], tree[SEAL]
    path.write_text(json.dumps(tree))
    assert load_manifest(tmp_path / "out").first_documents == {}


def test_a_file_whose_name_is_no_utf8_is_named_readably(tmp_path: Path) -> None:
    text = write(tmp_path / "text", 200)
    (text / "0.txt").rename(text / "caf\udce9.txt")
    manifest = prepare(data(text, 0.2), tmp_path / "out", lambda _: None)
    assert any("caf\\udce9.txt#" in name for name in manifest.first_documents["valid"])
