"""Shards and the manifest on disk."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.corpus import shards, tasks, tokenizer
from overnight.corpus.readers import Source
from overnight.errors import DataError
from overnight.state_files import SEAL, file_digest


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    pieces = [*tokenizer.SPECIALS, *"abcdefg"]
    tokenizer.save_tokenizer(tmp_path, pieces, lowercase=True)
    path = tmp_path / "train-00000.arrow"
    size = shards.write_shard(path, np.arange(6, dtype=np.uint16), np.array([1, 2, 3], np.int32), np.array([2, 1], np.int32))
    entry = shards.ShardEntry(path.name, "train", 2, 3, 6, size, file_digest(path))
    shards.save_manifest(
        tmp_path,
        shards.Manifest(
            shards.FORMAT_VERSION, tokenizer.vocabulary(pieces, True).hash, 12, {"paths": ["x"]}, [Source("x", 1, 2, 9)], 0, 0, [entry]
        ),
    )
    return tmp_path


def test_a_shard_opens_as_views_of_what_was_written(prepared: Path) -> None:
    (shard,) = shards.open_shards(prepared, "train")
    assert shard.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert shard.sentence_starts.tolist() == [0, 1, 3, 6]
    assert shard.document_sentences.tolist() == [0, 2, 3]
    assert [str(array.dtype) for array in (shard.tokens, shard.sentence_starts, shard.document_sentences)] == ["uint16", "int64", "int64"]
    assert not shard.tokens.flags.writeable  # a view of the memory map, not a copy
    assert shards.open_shards(prepared, "valid") == []


def test_the_file_is_as_the_format_says(prepared: Path) -> None:
    with pa.ipc.open_file(str(prepared / "train-00000.arrow")) as file:
        assert file.num_record_batches == 1
        table = file.read_all()
    assert table.schema.field("tokens").type == pa.list_(pa.uint16())
    assert table.schema.field("sentences").type == pa.list_(pa.int32())
    assert table.to_pylist() == [{"tokens": [0, 1, 2], "sentences": [1, 2]}, {"tokens": [3, 4, 5], "sentences": [3]}]


def test_a_shard_is_written_without_a_second_copy_of_it_in_memory(tmp_path: Path) -> None:
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        size = shards.write_shard(
            tmp_path / "x.arrow", np.zeros(1 << 20, np.uint16), np.full(1 << 14, 64, np.int32), np.full(64, 256, np.int32)
        )
    finally:
        pa.set_memory_pool(before)
    assert size == (tmp_path / "x.arrow").stat().st_size > 2 << 20 and pool.max_memory() < 1 << 20


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say which files are mapped")
def test_of_the_chunks_of_a_shard_none_is_mapped_any_more_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for number in range(3):
        path = tmp_path / f"chunk-{number}.arrow"
        labels = pa.array([number, None, 2.0], pa.float32())
        shards.write_shard(path, np.arange(6, dtype=np.uint16), np.array([1, 2, 3], np.int32), np.ones(3, np.int32), labels)
        shards.seal_chunk(path)
        parts.append((path, 1, 3))
    mapped: list[str] = []
    write = tasks.write_shard

    def watched(*values: Any) -> int:
        # A thread of Arrow's own may let go of a file a moment after it was read.
        for _ in range(1000):
            maps = Path("/proc/self/maps").read_text()
            if str(tmp_path) not in maps:
                break
            time.sleep(0.01)
        mapped.append(maps)
        return write(*values)

    monkeypatch.setattr(tasks, "write_shard", watched)
    entry = tasks.make_shard(tasks.ShardTask(tmp_path, "train-00000.arrow", "train", parts, tmp_path / "entry.json"))
    shard = shards.open_shard(tmp_path, entry)
    assert len(mapped) == 1 and str(tmp_path) not in mapped[0]
    assert shard.tokens.tolist() == [1, 2, 3, 4, 5] * 3 and shard.tokens.dtype == np.uint16
    assert shard.labels is not None and np.array_equal(shard.labels, [math.nan, 2.0] * 3, equal_nan=True)


@given(st.lists(st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=4), min_size=1, max_size=4), max_size=5))
def test_documents_come_back_from_a_shard(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]) -> None:
    path = tmp_path_factory.mktemp("shard") / "s.arrow"
    flat = [token for document in documents for sentence in document for token in sentence]
    lengths = [len(sentence) for document in documents for sentence in document]
    shards.write_shard(path, np.array(flat, np.uint16), np.array(lengths, np.int32), np.array([len(d) for d in documents], np.int32))
    tokens, sentence_lengths, offsets = shards.read_lists(path)
    assert tokens.tolist() == flat
    assert sentence_lengths.tolist() == lengths
    assert np.diff(offsets).tolist() == [len(document) for document in documents]


def test_the_manifest_comes_back(prepared: Path) -> None:
    manifest = shards.load_manifest(prepared)
    assert manifest.sources == [Source("x", 1, 2, 9)]
    assert (manifest.count("train", "tokens"), manifest.count("train", "documents"), manifest.count("valid", "tokens")) == (6, 2, 0)


def test_a_damaged_shard_is_named_with_what_to_do(prepared: Path) -> None:
    path = prepared / "train-00000.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000\.arrow: the shard is damaged.*delete it and prepare again"):
        shards.open_shards(prepared, "train")
    path.write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"bytes, the manifest says"):
        shards.open_shards(prepared, "train", verify=False)
    path.unlink()
    with pytest.raises(DataError, match="the shard is missing"):
        shards.open_shards(prepared, "train")


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE])
def test_where_the_machine_is_at_a_limit_no_file_is_to_be_deleted(prepared: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refused(path: str) -> Any:
        raise OSError(f"Memory mapping file failed: {os.strerror(code)}")  # as Arrow has it

    monkeypatch.setattr(pa, "memory_map", refused)
    with pytest.raises(DataError, match=rf"cannot be read: .*{os.strerror(code)}; raise the limits of this machine .* same command again$"):
        shards.read_table(next(prepared.glob("*.arrow")))


def test_another_tokenizer_is_refused(prepared: Path) -> None:
    tokenizer.save_tokenizer(prepared, [*tokenizer.SPECIALS, *"gfedcba"], lowercase=True)
    with pytest.raises(DataError, match=r"was made with the tokenizer \w+, but vocab.txt"):
        shards.open_shards(prepared, "train")
    (prepared / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: is missing"):
        shards.open_shards(prepared, "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"version": 3', '"version": 9'), "is of format version 9, this program reads 3"),
        (lambda text: text.replace('"version": 3', '"version": 1'), "is of format version 1, .*; delete the folder and prepare again"),
        (lambda text: text[:50], "is not JSON"),
        (lambda text: text.replace('"duplicates"', '"doubles"'), "duplicates: field required"),
        (lambda text: "[]", "is not a JSON object"),
        (lambda text: re.sub(r"\"tokens\": \d+", '"tokens": "many"', text), r"shards\.0\.tokens"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(prepared: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    path = prepared / "manifest.json"
    text = re.sub(f',\n "{SEAL}": "\\w+"', "", path.read_text())
    assert SEAL not in text
    path.write_text(change(text))
    with pytest.raises(DataError, match=message):
        shards.load_manifest(prepared)


def test_an_unprepared_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not prepared; run `overnight prepare` first"):
        shards.open_shards(tmp_path, "train")


def test_the_manifest_depends_on_its_values_alone(prepared: Path) -> None:
    before = (prepared / "manifest.json").read_bytes()
    shards.save_manifest(prepared, shards.load_manifest(prepared))
    assert (prepared / "manifest.json").read_bytes() == before
    assert json.loads(before)["version"] == shards.FORMAT_VERSION
