"""Large files in parts: the documents, names, labels and errors of one reading, wherever they are cut."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overnight.config import Data
from overnight.corpus import file_parts, pipeline
from overnight.corpus.file_parts import FilePart
from overnight.corpus.pipeline import prepare
from overnight.corpus.readers import Document, Source, documents, documents_and_parts, start_reading
from overnight.errors import DataError
from tests.corpus.test_pipeline import contents, silent, write_corpus

# Lines of letters, of white space of every kind, and of nothing.
LINES = st.lists(st.sampled_from(["a b", "ccc", "Ä\u3000ö", "", " ", "\t\u00a0", "\u2003\x1c", "\x85", "x" * 30, "d\r", "\r"]), max_size=40)
END = st.sampled_from([b"", b"\n", b"\n\n \n"])
HEAD = st.sampled_from([b"", b"\xef\xbb\xbf", b"\n", b" \n\n"])
per_example = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path, part_bytes: int, **changes: Any) -> tuple[list[Document], Source, int]:
    """Return what is read, and in how many parts."""
    data = dataclasses.replace(Data(paths=[str(path)], min_chars=0), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_parts, "PART_BYTES", part_bytes)
        patch.setattr(file_parts, "_BLOCK", 7)
        found = sum(isinstance(each, FilePart) for each in documents_and_parts(data, start_reading(data)))
        reading = start_reading(data)
        return list(documents(data, reading)), reading.sources[0], found


def same(path: Path, part_bytes: int, **changes: Any) -> int:
    """Check that a file in parts gives what it gives whole; return the number of parts."""
    whole, parts = ([], None), 0
    try:
        whole = read(path, 1 << 20, **changes)[:2]
    except DataError as error:
        with pytest.raises(DataError) as again:
            read(path, part_bytes, **changes)
        assert str(again.value) == str(error)
        return 0
    found, source, parts = read(path, part_bytes, **changes)
    assert (found, source) == whole
    return parts


@per_example
@given(LINES, HEAD, END, st.sampled_from(["line", "paragraph"]), st.integers(1, 60))
def test_text_in_parts_is_the_text(tmp_path: Path, lines: list[str], head: bytes, end: bytes, kind: str, size: int) -> None:
    (tmp_path / "a.txt").write_bytes(head + "\n".join(lines).encode() + end)
    same(tmp_path / "a.txt", size, documents=kind)


@per_example
@given(
    st.lists(
        st.one_of(st.text(max_size=20).map(lambda text: json.dumps({"text": text, "y": 1.5})), st.sampled_from(["", " ", "\u3000", "{"]))
    ),
    END,
    st.integers(1, 60),
)
def test_json_lines_in_parts_are_the_lines_with_their_labels_and_errors(tmp_path: Path, lines: list[str], end: bytes, size: int) -> None:
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode() + end)
    same(tmp_path / "a.jsonl", size, label="y")


def test_an_error_names_its_line_and_its_byte_in_the_whole_file(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {number}"}) for number in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:40], "{", *rows[40:]]))
    with pytest.raises(DataError, match=r"a\.jsonl:41: is not JSON"):
        read(tmp_path / "a.jsonl", 100)
    (tmp_path / "b.txt").write_bytes(b"some words\n" * 30 + b"w\xffx\n" + b"words\n" * 30)
    with pytest.raises(DataError, match=r"b\.txt: byte 331 \(0xff\) is not UTF-8"):
        read(tmp_path / "b.txt", 100, documents="line")


def test_what_cannot_be_cut_is_read_whole(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"row {number}"}) for number in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert same(tmp_path / "a.jsonl", 100) > 5
    assert same(tmp_path / "a.jsonl", 100, max_invalid_lines=3) == 0
    (tmp_path / "a.csv").write_text("text\n" + '"two\nlines"\n' * 50)
    assert same(tmp_path / "a.csv", 100) == 0
    (tmp_path / "book.txt").write_text(
        "*** START OF THE PROJECT GUTENBERG EBOOK A ***\n" + "Words.\n\n" * 50 + "End of Project Gutenberg's A\nlicense\n"
    )
    assert same(tmp_path / "book.txt", 100, documents="paragraph") == 0
    assert read(tmp_path / "book.txt", 100, documents="paragraph")[1].licenses == 1
    assert same(tmp_path / "book.txt", 100, documents="paragraph", gutenberg_license="keep") > 2
    assert same(tmp_path / "book.txt", 100) == 0
    (tmp_path / "a.md").write_text("---\ntitle: A\n---\n" + "Words.\n\n" * 50)
    assert same(tmp_path / "a.md", 100, documents="paragraph") == same(tmp_path / "a.md", 100, documents="line") == 0


def test_licenses_in_rows_are_counted_over_the_parts(tmp_path: Path) -> None:
    book = "*** START OF THE PROJECT GUTENBERG EBOOK A ***\nWords.\nEnd of Project Gutenberg's A\nlicense\n"
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": book}) for _ in range(20)))
    assert same(tmp_path / "a.jsonl", 100) > 5
    assert read(tmp_path / "a.jsonl", 100)[1].licenses == 20


def test_what_rows_lack_and_what_was_replaced_is_counted_over_the_parts(tmp_path: Path) -> None:
    rows = [json.dumps({"text": "words"} | ({"title": "A"} if number % 3 else {})).encode() for number in range(60)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*rows, b'{"title": "A", "text": "caf\xe9"}']))
    settings = {"field": "title+text", "encoding_errors": "replace"}
    assert same(tmp_path / "a.jsonl", 100, **settings) > 5
    source = read(tmp_path / "a.jsonl", 100, **settings)[1]
    assert (source.without, source.replaced) == ({"title": 20}, 1)


def test_a_paragraph_without_end_is_an_error_and_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts.OpenFile, "max_bytes", 50)
    (tmp_path / "a.txt").write_text("word\n\n" * 10 + "word\n" * 1000)
    with pytest.raises(DataError, match=r"a\.txt:\d+: more than 0 MB in one paragraph"):
        read(tmp_path / "a.txt", 20, documents="paragraph")
    with open(tmp_path / "a.txt", "rb") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_parts, "PART_BYTES", 20)
        patch.setattr(file_parts, "_BLOCK", 7)
        assert max(map(len, file_parts._spans(file, True))) < 100


@pytest.mark.parametrize("before", range(0, 40, 3))
def test_the_longest_line_is_one_document_wherever_it_begins_and_a_longer_one_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(file_parts.OpenFile, "max_bytes", 200)
    (tmp_path / "a.txt").write_bytes(b"w\n" * before + b"x" * 199 + b"\n" + b"y\n" * 40)
    found, _, parts = read(tmp_path / "a.txt", 20, documents="line")
    assert [each.text for each in found] == ["w"] * before + ["x" * 199] + ["y"] * 40 and parts > 3
    (tmp_path / "a.txt").write_bytes(b"w\n" * before + b"x" * 200 + b"\n" + b"y\n" * 40)
    with pytest.raises(DataError, match=rf"a\.txt:{before + 1}: more than 0 MB in one line"):
        read(tmp_path / "a.txt", 20, documents="line")


def test_nothing_is_read_behind_a_line_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts.OpenFile, "max_bytes", 200)
    monkeypatch.setattr(file_parts, "PART_BYTES", 20)
    monkeypatch.setattr(file_parts, "_BLOCK", 7)
    (tmp_path / "a.txt").write_bytes(b"x" * 300 + b"\n" + b"y\n" * 1000)
    with open(tmp_path / "a.txt", "rb") as file:
        assert [len(span) for span in file_parts._spans(file, False)] == [221]
        assert file.tell() == 221
        file.seek(0)
        assert file_parts.parts(file, "a.txt", "text", Data(documents="line")) == [] and file.tell() == 0


@pytest.mark.parametrize("kind", ["parts", "documents"])
def test_one_large_file_is_many_tasks_and_the_bytes_depend_neither_on_them_nor_on_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    texts = write_corpus(tmp_path / "text", 60)
    with open(tmp_path / "one.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text, "n": number}) + "\n" for number, text in enumerate(texts))
    data = Data(paths=[str(tmp_path / "one.jsonl")], vocab_size=300, valid_fraction=0.2, workers=1, label="n", tokenizer="bytes")
    prepare(data, tmp_path / "whole", silent, shard_tokens=4000)
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 10_000)
    if kind == "parts":
        monkeypatch.setattr(file_parts, "PART_BYTES", 10_000)
        monkeypatch.setattr(file_parts, "_BLOCK", 1000)
    sizes: list[list[int]] = []
    real = pipeline.make_shard

    def looking(task: Any) -> Any:
        if not sizes:
            sizes.append([path.stat().st_size for path in (task.folder / "work").glob("clean-*.arrow")])
        return real(task)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "make_shard", looking)
        prepare(data, tmp_path / "one", silent, shard_tokens=4000)
    assert len(sizes[0]) > 8 and max(sizes[0]) < 25_000
    assert contents(tmp_path / "one") == contents(tmp_path / "whole")
    if kind == "parts":
        prepare(dataclasses.replace(data, workers=2), tmp_path / "two", silent, shard_tokens=4000)
        assert contents(tmp_path / "two") == contents(tmp_path / "whole")


def test_a_chunk_closes_at_its_size_and_has_no_more_documents_than_take_as_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 1500)
    assert [len(group) for group in pipeline._chunks(Document("x" * size) for size in (300, 300, 300, 300, 5000, 10))] == [4, 1, 1]
    assert [len(group) for group in pipeline._chunks(Document("") for _ in range(40))] == [15, 15, 10]


@pytest.mark.parametrize("kind", ["line", "paragraph"])
def test_a_part_of_tiny_documents_has_no_more_than_take_as_much_memory(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "PART_BYTES", 5000)
    (tmp_path / "a.txt").write_text("ok\n\n" * 3000)
    data = Data(paths=[str(tmp_path / "a.txt")], documents=kind, min_chars=0)
    found = [file_parts.read_part(part)[0] for part in documents_and_parts(data, start_reading(data)) if isinstance(part, FilePart)]
    assert sum(map(len, found)) == 3000 and max(map(len, found)) <= 51


@pytest.mark.parametrize("allowed", [(0, 5), (5, 0)])
def test_a_preparation_that_continues_with_another_number_of_invalid_lines_reads_each_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: tuple[int, int]
) -> None:
    """Whether a file is read in parts depends on that number, so the chunks that are there begin and end elsewhere."""
    monkeypatch.setattr(file_parts, "PART_BYTES", 5_000)
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 5_000)
    rows = [
        json.dumps({"id": "x" * 40, "text": f"Row {number} of a table of words, which has {7 * number} birds."}) for number in range(300)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:200], "{", *rows[200:]]))
    data = Data(paths=[str(tmp_path / "a.jsonl")], vocab_size=200, min_chars=0, valid_fraction=0.0, workers=1)
    first, second = (dataclasses.replace(data, max_invalid_lines=each) for each in allowed)
    if allowed[0]:  # killed while it reads
        (tmp_path / "a.jsonl").write_text("\n".join(rows))
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(pipeline, "check_found", lambda sources: {}["killed"])
            prepare(first, tmp_path / "out", silent)
    else:
        with pytest.raises(DataError, match=r"a\.jsonl:201: is not JSON"):
            prepare(first, tmp_path / "out", silent)
    assert (tmp_path / "out/work/clean-00001.arrow").exists()
    manifest = prepare(second, tmp_path / "out", silent)
    assert (manifest.count("train", "documents"), manifest.duplicates) == (300, 0)
    prepare(second, tmp_path / "whole", silent)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("now", ["event\n" * 100, "x\n" * 900, ""])
def test_a_file_that_changes_before_its_parts_are_read_is_refused(now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "PART_BYTES", 100)
    (log := tmp_path / "log.txt").write_text("event\n" * 300)
    data = Data(paths=[str(log)], documents="line", min_chars=0)
    parts = [part for part in documents_and_parts(data, start_reading(data)) if isinstance(part, FilePart)]
    assert sum(len(file_parts.read_part(part)[0]) for part in parts) == 300
    log.write_text(now)
    for part in parts:
        with pytest.raises(DataError, match=r"log\.txt: has changed while it was read; run the same command again once it is complete"):
            file_parts.read_part(part)
    log.unlink()
    with pytest.raises(DataError, match=r"log\.txt: cannot be read \(No such file or directory\)"):
        file_parts.read_part(parts[0])
    log.write_text(now)
    with pytest.raises(DataError, match="has changed while it was read"):  # also where it is not known what it was
        file_parts.read_part(dataclasses.replace(parts[-1], planned=None, end=10_000))
