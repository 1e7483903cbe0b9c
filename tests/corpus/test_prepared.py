"""A prepared folder read back as text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.corpus.prepared import Decoder, Prepared
from overnight.corpus.shards import load_manifest, open_shards
from overnight.corpus.tokenizer import load_tokenizer
from overnight.errors import DataError
from tests.corpus.folders import prepared_folder, texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    marks = "Don't (ever) go, he said: why? Größe 東京! " * 4
    return prepared_folder(tmp_path_factory.mktemp("words"), {"a.jsonl": [*texts(20), marks]}, lowercase=False)


@given(tokens=st.lists(st.integers(0, 299), max_size=40))
@settings(max_examples=100, deadline=None)
def test_decoded_text_is_that_of_the_tokenizers_library(folder: Path, tokens: list[int]) -> None:
    decoder = Decoder(folder, load_manifest(folder))
    reference = load_tokenizer(folder).decode([token % len(decoder.tokens) for token in tokens], skip_special_tokens=False)
    # The library shows the mark of a word's continuation where nothing is before it; no document begins so.
    reference = reference.removeprefix("##") if tokens and decoder.tokens[tokens[0] % len(decoder.tokens)] != "##" else reference
    assert decoder.text(np.array([token % len(decoder.tokens) for token in tokens], np.uint16)) == reference.strip()


def test_characters_of_the_tokens_add_up_to_those_of_the_text(folder: Path) -> None:
    prepared = Prepared(folder)
    for document in prepared.documents("train"):
        counts = np.bincount(document.tokens, minlength=len(prepared.decoder.tokens))
        # The first token has no space before it in the text.
        assert (counts * prepared.decoder.characters()).sum() == len(prepared.decoder.text(document.tokens)) + 1


def test_bytes_give_back_the_text(tmp_path: Path) -> None:
    rows = [*texts(10), "Größe und 東京 " * 10, "a\u200bb & c " * 20]
    prepared = Prepared(prepared_folder(tmp_path, {"a.jsonl": rows}, tokenizer="bytes"))
    found = {prepared.decoder.text(document.tokens) for split in prepared.splits() for document in prepared.documents(split)}
    assert found == {row.strip() for row in rows}


def test_documents_are_numbered_through_the_shards_of_a_split(folder: Path) -> None:
    prepared = Prepared(folder)
    every = list(prepared.documents("train"))
    assert [document.number for document in every] == list(range(1, prepared.manifest.count("train", "documents") + 1))
    assert np.array_equal(
        np.concatenate([document.tokens for document in every]), np.concatenate([shard.tokens for shard in open_shards(folder, "train")])
    )
    for number in (len(every), 1, 7):
        assert np.array_equal(prepared.document("train", number).tokens, every[number - 1].tokens)
    for number in (0, len(every) + 1):
        with pytest.raises(DataError, match=rf"there is no document {number} in train, which has documents 1 to {len(every)}"):
            prepared.document("train", number)
    with pytest.raises(DataError, match="in test, which has no document"):
        prepared.document("test", 1)


def test_a_folder_that_is_none_and_one_with_another_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: is not there; name a folder that `overnight prepare` has made"):
        Prepared(tmp_path / "absent")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file: is no folder"):
        Prepared(tmp_path / "file")
    with pytest.raises(DataError, match=r"manifest\.json: is missing, so the folder is not prepared"):
        Prepared(tmp_path)
    folders = [prepared_folder(tmp_path / name, {"a.jsonl": texts(20, seed)}) for seed, name in enumerate("ab")]
    for name in ("vocab.txt", "tokenizer.json"):
        (folders[0] / name).write_bytes((folders[1] / name).read_bytes())
    with pytest.raises(DataError, match="was made with the tokenizer"):
        _ = Prepared(folders[0]).decoder


def test_a_damaged_shard_is_refused_when_it_is_read(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, {"a.jsonl": texts(20)})
    path = folder / "valid-00000.arrow"
    content = bytearray(path.read_bytes())
    content[300] ^= 1
    path.write_bytes(content)
    prepared = Prepared(folder)
    prepared.document("train", 1)
    with pytest.raises(DataError, match=r"valid-00000\.arrow: the shard is damaged, its checksum is"):
        prepared.document("valid", 1)
