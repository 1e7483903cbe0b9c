"""Paragraphs that many documents have are left out, whatever the order, the merges and the workers."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.config import Data
from overnight.corpus import dedup, external_sort, paragraphs, pipeline
from overnight.corpus.clean import clean
from overnight.corpus.paragraphs import COLUMN, sentence_counts, without_repeated_paragraphs
from overnight.corpus.pipeline import prepare
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import open_shards, read_table, seal_chunk, write_table
from overnight.corpus.tasks import outcome_of
from overnight.corpus.tokenizer import load_tokenizer
from tests.corpus.folders import contents

NOTICE = "All rights are reserved by nobody. Read this again tomorrow."
MENU = "Home, About, Contact"
PARAGRAPH = st.lists(st.sampled_from(["One is here.", "Two is there.", "three"]), min_size=1, max_size=3).map(" ".join)


def silent(line: str) -> None:
    pass


def chunks_of(folder: Path, documents: list[list[str]]) -> list[Path]:
    paths = []
    for first in range(0, len(documents), 3):
        texts = ["\n\n".join(each) for each in documents[first : first + 3]]
        lines = [sentences(text) for text in texts]
        columns = {
            "hash": pa.array([dedup.document_hash(each) for each in lines], pa.binary(16)),
            "text": pa.array(["\n".join(each) for each in lines], pa.large_string()),
            "name": pa.array([str(first + row) for row in range(len(texts))], pa.string()),
            COLUMN: pa.array([sentence_counts(text) for text in texts], pa.list_(pa.int32())),
        }
        paths.append(folder / f"clean-{first // 3:05d}.arrow")
        write_table(paths[-1], columns, {"short": "1"})
        seal_chunk(paths[-1])
    return paths


@settings(max_examples=40)
@given(st.lists(st.lists(PARAGRAPH, min_size=1, max_size=5), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 20))
def test_what_is_left_is_what_counting_says(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[str]], most: int, min_chars: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_sort, "BLOCK", 2)
        patch.setattr(external_sort, "FAN_IN", 2)
        patch.setattr(external_sort, "RANGE", 5)
        chunks = chunks_of(tmp_path_factory.mktemp("paragraphs"), documents)
        kept = without_repeated_paragraphs(chunks, Data(repeated_paragraphs=most, min_chars=min_chars), 1, silent)
    first = [set(each) for number, each in enumerate(documents) if " ".join(each) not in map(" ".join, documents[:number])]
    expected, left_out = [], 0
    for name, each in enumerate(documents):
        wanted = [p for p in dict.fromkeys(each) if sum(p in other for other in first) <= most]
        left_out += len(each) - len(wanted)
        lines = [line for p in wanted for line in sentences(p)]
        if lines and (len(wanted) == len(each) or len("\n".join(lines)) >= min_chars):
            expected.append((str(name), "\n".join(lines), dedup.document_hash(lines)))
    tables = [read_table(path) for path in kept]
    assert [
        row for table in tables for row in zip(*(table.column(name).to_pylist() for name in ("name", "text", "hash")), strict=True)
    ] == expected
    drops = outcome_of(kept).drops
    assert drops.counts["repeated_paragraphs"] == left_out
    assert (
        drops.counts["min_chars"] == len(documents) - len(expected) == sum(int(t.schema.metadata[b"short"]) for t in tables) - len(tables)
    )


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 10_000)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeghilnorstu", k=rng.randint(2, 9))) for _ in range(400)]
    (tmp_path / "text").mkdir()
    for number in range(40):
        own = [" ".join(rng.choices(words, k=30)).capitalize() + "." for _ in range(8)]
        own.insert(3, NOTICE if number % 2 else own[0])
        (tmp_path / "text" / f"{number:03d}.txt").write_text("\n\n".join([MENU, *own]))
    return tmp_path / "text"


def data(corpus: Path, **changes: Any) -> Data:
    return dataclasses.replace(Data(paths=[str(corpus)], vocab_size=300, valid_fraction=0.2, workers=1, repeated_paragraphs=5), **changes)


def test_prepare_leaves_them_out_counts_and_samples_them_with_any_number_of_workers(corpus: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    manifest = prepare(data(corpus), tmp_path / "1", lines.append)
    prepare(data(corpus, workers=2), tmp_path / "2", silent)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    drops = json.loads((tmp_path / "1/drops.json").read_text())["repeated_paragraphs"]
    assert drops["count"] == 40 + 20 + 20  # the menu of all, the notice of half, and a repetition inside the others
    assert {MENU, NOTICE} < {sample["text"] for sample in drops["samples"]}
    assert any("80 of 400 are left out" in line for line in lines)
    assert manifest.count("train", "documents") + manifest.count("valid", "documents") == 40
    tokenizer = load_tokenizer(tmp_path / "1")
    (shard,) = open_shards(tmp_path / "1", "train")
    found = tokenizer.decode(shard.tokens.tolist())
    assert "reserved" not in found and "contact" not in found
    text = clean((corpus / "001.txt").read_text())
    wanted = [line for p in text.split("\n\n") if p not in (MENU, NOTICE) for line in sentences(p)]
    sizes = [len(tokenizer.encode(line, add_special_tokens=False).ids) for line in wanted]
    lengths = np.diff(shard.sentence_starts).tolist()
    assert any(lengths[at : at + len(sizes)] == sizes for at in shard.document_sentences[:-1])


class _StopError(Exception):
    pass


@pytest.mark.parametrize("stage", ["count_paragraphs", "find_repeated", "leave_out"])
def test_it_continues_where_it_stopped_and_gives_the_same_bytes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(external_sort, "FAN_IN", 2)
    monkeypatch.setattr(external_sort, "RANGE", 100)
    prepare(data(corpus), tmp_path / "whole", silent)
    original, calls = getattr(paragraphs, stage), []

    def stopping(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 2:
            raise _StopError
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(paragraphs, stage, stopping)
        with pytest.raises(_StopError):
            prepare(data(corpus), tmp_path / "out", silent)
    prepare(data(corpus), tmp_path / "out", silent)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
