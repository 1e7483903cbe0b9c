"""A preparation that continues says of its text what the first one said."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from overnight.corpus import pipeline
from overnight.corpus.pipeline import prepare
from overnight.errors import DataError
from tests.corpus.test_pipeline import settings, silent, write_corpus


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
