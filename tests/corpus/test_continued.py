"""A preparation that continues or is mended: what it says, and that what a message advises works."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from overnight.corpus import pipeline
from overnight.corpus.pipeline import prepare
from overnight.corpus.readers import start_reading
from overnight.corpus.shards import open_shards
from overnight.errors import DataError
from tests.corpus.test_pipeline import contents, settings, silent, write_corpus


def test_a_full_disk_is_told_with_the_size_of_the_text_also_where_it_was_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "text")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pipeline, "_tokenize", full)
    said = []
    for _ in range(2):
        with pytest.raises(DataError) as error:
            prepare(settings(tmp_path / "text"), tmp_path / "out", silent)
        said.append(str(error.value).partition(" while preparing")[0])
    assert said[0] == said[1] and "read so far" not in said[0]


def test_a_full_disk_is_told_with_what_is_asked_for_and_what_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "text")
    reading, error = start_reading(settings(tmp_path / "text")), OSError(errno.ENOSPC, "No space left on device")
    reading.sources[0].bytes, reading.sources[0].documents, reading.done_bytes = 20_000_000, 100_000, reading.total_bytes
    (tmp_path / "out/work").mkdir(parents=True)
    (tmp_path / "out/work/clean-00000.arrow").write_bytes(bytes(2_000_000))
    for changes, said in (
        ({}, "20.0 MB of text need about 40 MB while preparing, 2.0 MB are used there"),
        ({"near_duplicates": 0.8}, "20.0 MB of text need about 130 MB while preparing"),
        ({"repeated_paragraphs": 9}, "about 40 MB, and more for data.repeated_paragraphs, while"),
    ):
        data = dataclasses.replace(settings(tmp_path / "text"), **changes)  # type: ignore[arg-type]
        assert said in pipeline._full_disk(data, tmp_path / "out", reading, error)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
def test_a_file_of_the_vocabulary_that_is_missing_is_made_by_preparing_again(tmp_path: Path, name: str) -> None:
    write_corpus(tmp_path / "text")
    prepare(settings(tmp_path / "text"), tmp_path / "out", silent)
    before = contents(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    with pytest.raises(DataError, match=name):
        open_shards(tmp_path / "out", "train")
    lines: list[str] = []
    prepare(settings(tmp_path / "text"), tmp_path / "out", lines.append)
    assert lines[0] == f"prepare: {tmp_path / 'out'} lacks {name}; preparing it again"
    assert contents(tmp_path / "out") == before


def test_a_path_by_a_variable_and_what_it_stands_for_are_the_beginning_of_one_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "text")
    monkeypatch.setenv("MINE", str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pipeline, "_tokenize", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare(dataclasses.replace(settings(tmp_path / "text"), paths=["$MINE/text"]), tmp_path / "out", silent)
    lines: list[str] = []
    prepare(settings(tmp_path / "text"), tmp_path / "out", lines.append)
    assert lines[0] == f"prepare: continuing in {tmp_path / 'out'}"
