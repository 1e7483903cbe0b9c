"""Text to bytes: what a document becomes, and preparation of bytes from end to end."""

from __future__ import annotations

import html
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.config import Data
from overnight.corpus import dedup, pipeline
from overnight.corpus.bytes import VOCABULARY_HASH, document_bytes
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import open_shards
from overnight.errors import DataError
from tests.corpus.folders import contents


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  Tom &amp; J&eacute;r\n\tôme ", "Tom & Jér ôme"),
        ("one<br /><br />two<BR>three<p>four</p>", "one two three four"),
        ('a <a href="x?b=1&amp;c">link</a>, <i>so</i> <font color=red>red</font>', "a link , so red"),
        ("<!-- a\ncomment -->text", "text"),
        # An escaped tag is text, and what is no element is too.
        ("&lt;br&gt; I &lt;3 it", "<br> I <3 it"),
        ("<sighs> 1 < 2 > 0, a<b and c>d, <wink-wink> <3 <", "<sighs> 1 < 2 > 0, a<b and c>d, <wink-wink> <3 <"),
        ("non\u00a0breaking\u2028line\x1cend", "non breaking line end"),
        ("&nbsp; &#8217; &#x27; &Garth; &#55296;", "\u2019 ' &Garth; \ufffd"),
        (f"a &#{'0' * 5000}65; &#{'9' * 5000}; &#{'0' * 5000}", "a A \ufffd \ufffd"),
        ("", ""),
        ("<br />", ""),
        ("half \ud800 pair", "half ? pair"),
    ],
)
def test_markup_is_undone_and_white_space_collapsed(text: str, expected: str) -> None:
    assert document_bytes(text) == f"\n {expected} ".encode()


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<&")))
def test_plain_text_loses_nothing_but_white_space(text: str) -> None:
    assert document_bytes(text) == b"\n " + " ".join(text.split()).encode() + b" "
    assert document_bytes(html.escape(text)) == document_bytes(text)


def silent(line: str) -> None:
    pass


def write_reviews(folder: Path, count: int = 300) -> list[dict[str, Any]]:
    """Reviews in several files, with repeated, empty and unlabeled ones."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeghilnorstuéß", k=rng.randint(2, 9))) for _ in range(200)]
    rows: list[dict[str, Any]] = [
        {"review": " ".join(rng.choices(words, k=rng.randint(1, 60))) + f"<br />&amp; {i}", "stars": rng.choice([1, 2.5, 5, None])}
        for i in range(count)
    ]
    rows[50] = {"review": rows[7]["review"].replace(" ", "\n "), "stars": 4}
    rows[51], rows[52] = {"review": " <br /> \n"}, {"review": ""}
    folder.mkdir()
    for number in range(3):
        part = rows[number * count // 3 : (number + 1) * count // 3]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return rows


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 5_000)
    return write_reviews(tmp_path / "text")


def settings(tmp_path: Path, **changes: Any) -> Data:
    given_settings = {"field": "review", "label": "stars", "min_chars": 0, "valid_fraction": 0.1, "test_fraction": 0.2, "workers": 1}
    return Data(paths=[str(tmp_path / "text")], tokenizer="bytes", **(given_settings | changes))


def test_every_document_arrives_in_order_on_its_side_with_its_label(reviews: list[dict[str, Any]], tmp_path: Path) -> None:
    manifest = prepare(settings(tmp_path), tmp_path / "out", silent, shard_tokens=10_000)
    expected: dict[str, list[tuple[bytes, float | None]]] = {"train": [], "valid": [], "test": []}
    seen = set()
    for row in reviews:
        text = document_bytes(row["review"])
        if len(text) == 3 or text in seen:
            continue
        seen.add(text)
        digest = np.frombuffer(dedup.document_hash([text[2:-1].decode()]), np.uint8)[None]
        position = float(dedup.hash_position(digest)[0])
        split = "valid" if position < 0.1 else "test" if position >= 0.8 else "train"
        expected[split].append((text, row.get("stars")))
    for split, documents in expected.items():
        found = []
        shards = open_shards(tmp_path / "out", split)
        for shard in shards:
            assert shard.tokens.dtype == np.uint8 and shard.labels is not None and not shard.tokens.flags.writeable
            assert shard.document_sentences.tolist() == list(range(len(shard.sentence_starts)))  # one sentence each
            for start, end, label in zip(shard.sentence_starts, shard.sentence_starts[1:], shard.labels, strict=False):
                found.append((shard.tokens[start:end].tobytes(), None if np.isnan(label) else float(label)))
        assert found == documents and len(documents) > 10
        assert manifest.count(split, "tokens") == sum(len(text) for text, _ in documents)
        assert len(shards) > 1 or split != "train"
    assert (manifest.duplicates, manifest.short, manifest.vocab_size, manifest.tokenizer) == (1, 2, 256, VOCABULARY_HASH)
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir() if path.suffix != ".arrow") == ["", ".json", ".json"]
    with pa.ipc.open_file(str(tmp_path / "out/train-00000.arrow")) as file:
        schema = file.schema
    assert [(f.name, f.type) for f in schema] == [
        ("tokens", pa.list_(pa.uint8())),
        ("sentences", pa.list_(pa.int32())),
        ("label", pa.float32()),
    ]


@pytest.mark.usefixtures("reviews")
def test_the_bytes_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    for workers in (1, 3):
        prepare(settings(tmp_path, workers=workers), tmp_path / str(workers), silent, shard_tokens=10_000)
    assert contents(tmp_path / "1") == contents(tmp_path / "3") and len(contents(tmp_path / "1")) > 5


class _StopError(Exception):
    pass


@pytest.mark.usefixtures("reviews")
@pytest.mark.parametrize("stage", ["clean_chunk", "token_chunk", "make_shard", "save_manifest"])
def test_it_continues_where_it_stopped_and_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    prepare(settings(tmp_path), tmp_path / "whole", silent, shard_tokens=10_000)
    original, calls = getattr(pipeline, stage), []

    def stopping(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > (0 if stage == "save_manifest" else 2):
            raise _StopError
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, stage, stopping)
        with pytest.raises(_StopError):
            prepare(settings(tmp_path), tmp_path / "out", silent, shard_tokens=10_000)
    lines: list[str] = []
    prepare(settings(tmp_path), tmp_path / "out", lines.append, shard_tokens=10_000)
    assert lines[0].startswith("prepare: continuing") and contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("reviews")
def test_a_file_system_that_is_full_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(settings(tmp_path), tmp_path / "whole", silent)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"cannot write \(No space left on device\).*which continues"):
            prepare(settings(tmp_path), tmp_path / "out", silent)
    assert not list((tmp_path / "out").rglob("*.tmp")) and not (tmp_path / "out/manifest.json").exists()
    prepare(settings(tmp_path), tmp_path / "out", silent)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.usefixtures("reviews")
def test_splits_do_not_move_when_another_share_changes(tmp_path: Path) -> None:
    def texts(folder: str, split: str, **changes: Any) -> set[bytes]:
        out = tmp_path / folder
        prepare(settings(tmp_path, **changes), out, silent)
        return {
            s.tokens[a:b].tobytes() for s in open_shards(out, split) for a, b in zip(s.sentence_starts, s.sentence_starts[1:], strict=False)
        }

    valid, test = texts("a", "valid"), texts("a", "test")
    assert valid < texts("b", "valid", valid_fraction=0.3) and texts("b", "test", valid_fraction=0.3) == test
    assert test < texts("c", "test", test_fraction=0.4) and texts("c", "valid", test_fraction=0.4) == valid
    assert texts("d", "test", test_fraction=0.0) == set() and texts("d", "valid", test_fraction=0.0) == valid


@pytest.mark.usefixtures("reviews")
def test_shares_and_labels_that_find_nothing_are_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.test_fraction = 1e-06 selects none of \d+ documents for the test; use at least 0") as error:
        prepare(settings(tmp_path, test_fraction=1e-6), tmp_path / "out", silent)
    enough = float(str(error.value).split("at least ")[1].split()[0])
    assert prepare(settings(tmp_path, test_fraction=enough), tmp_path / "out", silent).count("test", "documents") >= 1
    with pytest.raises(DataError, match=r"no document has a number under data\.label = 'rating'"):
        prepare(settings(tmp_path, label="rating"), tmp_path / "no-label", silent)
    shutil.rmtree(tmp_path / "out")
    manifest = prepare(settings(tmp_path, label=""), tmp_path / "out", silent)
    assert open_shards(tmp_path / "out", "train")[0].labels is None and manifest.settings["label"] == ""


def test_min_chars_counts_characters_not_bytes(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("ééééé\néééé\nplain text\n" + "more\n")
    data = settings(tmp_path, label="", min_chars=5, documents="line", valid_fraction=0.0, test_fraction=0.0)
    manifest = prepare(data, tmp_path / "out", silent)
    (shard,) = open_shards(tmp_path / "out", "train")
    assert shard.tokens.tobytes().decode() == "\n ééééé \n plain text " and manifest.short == 2


def test_bytes_that_are_not_utf8_are_refused_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_bytes(b"caf\xe9 noir")
    data = settings(tmp_path, label="", valid_fraction=0.0, test_fraction=0.0)
    with pytest.raises(DataError, match=r"byte 3 \(0xe9\) is not UTF-8"):
        prepare(data, tmp_path / "out", silent)
    prepare(settings(tmp_path, label="", valid_fraction=0.0, test_fraction=0.0, encoding_errors="replace"), tmp_path / "out", silent)
    assert open_shards(tmp_path / "out", "train")[0].tokens.tobytes().decode() == "\n caf\ufffd noir "
