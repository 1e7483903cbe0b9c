"""Every document of the shards has a row that says where it is from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from overnight.config import Data, NoFilters
from overnight.corpus import dedup, pipeline
from overnight.corpus.document_table import open_document_table
from overnight.corpus.pipeline import prepare
from overnight.corpus.prepared import Prepared
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import load_manifest
from overnight.corpus.tokenizer import load_tokenizer
from overnight.errors import DataError
from tests.corpus.folders import as_of_old, prepared_folder, texts


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of one shard are of several chunks, and those of one chunk of several shards."""
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 3000)


def reference(place: Path, sources: dict[str, list[str]]) -> dict[str, tuple[int, str]]:
    """The source and the text of each document, by its name."""
    return {f"{place / name}#{i}": (number, text) for number, (name, rows) in enumerate(sources.items()) for i, text in enumerate(rows, 1)}


@pytest.mark.parametrize("tokenizer", ["wordpiece", "bytes"])
def test_each_document_has_its_name_source_characters_and_hash(tmp_path: Path, tokenizer: str) -> None:
    sources = {"a.jsonl": texts(25), "b.jsonl": [*texts(25, seed=1), "Größe. " * 20]}
    folder = prepared_folder(tmp_path, sources, tokenizer=tokenizer, test_fraction=0.2 if tokenizer == "bytes" else 0.0)
    prepared, expected = Prepared(folder), reference(tmp_path, sources)
    assert prepared.table and len(prepared.entries("train")) > 2
    seen = []
    for entry in prepared.manifest.shards:
        rows = prepared.table.rows(entry)
        assert len(rows.names) == entry.documents
        for row, name in enumerate(rows.names.to_pylist()):
            source, text = expected[name]
            found = sentences(text.strip()) if tokenizer == "wordpiece" else [text.strip()]
            assert rows.sources[row] == source and rows.characters[row] == len("\n".join(found))
            assert int(rows.hashes[row]).to_bytes(8, "little") == dedup.document_hash(found)[:8]
            seen.append(name)
    assert sorted(seen) == sorted(expected)


def test_a_row_is_of_the_document_at_its_place_in_the_shard(tmp_path: Path) -> None:
    sources = {"a.jsonl": texts(30)}
    prepared, expected = Prepared(prepared_folder(tmp_path, sources)), reference(tmp_path, sources)
    tokenizer = load_tokenizer(prepared.folder)
    for split in ("train", "valid"):
        for document in prepared.documents(split):
            assert document.tokens.tolist() == tokenizer.encode(expected[document.name][1], add_special_tokens=False).ids
            assert document.source == str(tmp_path / "a.jsonl")


def test_documents_that_were_dropped_for_their_tokens_or_have_none_have_no_row(tmp_path: Path) -> None:
    hidden = "\u00ad\u2060" * 80  # the normalizer of BERT removes format characters
    rows = [*texts(20), hidden, "?!" * 60, *texts(10, seed=1)]
    sources = {"a.jsonl": rows}
    folder = prepared_folder(tmp_path, sources, filters=NoFilters(max_tokens_per_char=0.6))
    manifest, expected = load_manifest(folder), reference(tmp_path, sources)
    tokenizer = load_tokenizer(folder)
    names = [document.name for split in ("train", "valid") for document in Prepared(folder).documents(split)]
    assert manifest.dropped["filters.max_tokens_per_char"] >= 1 and f"{tmp_path / 'a.jsonl'}#22" not in names
    assert f"{tmp_path / 'a.jsonl'}#21" not in names
    for split in ("train", "valid"):
        for document in Prepared(folder).documents(split):
            assert document.tokens.tolist() == tokenizer.encode(expected[document.name][1], add_special_tokens=False).ids


def test_a_part_of_a_dump_is_of_its_source(tmp_path: Path) -> None:
    page = "<page><title>{0}</title><ns>0</ns><id>{1}</id><revision><text>{2}</text></revision></page>"
    pages = "".join(page.format(f"Page {i}", i, text) for i, text in enumerate(texts(12, seed=2)))
    dump = tmp_path / "dump.xml"
    dump.write_text(f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{pages}</mediawiki>')
    folder = tmp_path / "out"
    prepared_folder(tmp_path, {"a.jsonl": texts(12)})
    data = Data(paths=[str(tmp_path / "a.jsonl"), str(dump)], vocab_size=300, valid_fraction=0.2, workers=1)
    prepare(data, folder, lambda line: None)
    prepared = Prepared(folder)
    found = [(document.source, document.name) for split in ("train", "valid") for document in prepared.documents(split)]
    assert len([source for source, name in found if source == str(dump) and "#Page " in name]) == 12
    assert len([source for source, _ in found if source == str(tmp_path / "a.jsonl")]) == 12


def test_a_missing_table_is_made_again_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, {"a.jsonl": texts(20)})
    path = folder / "documents.arrow"
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with pytest.raises(
        DataError, match=r"documents\.arrow: is damaged, its checksum is \w+, the manifest says \w+; delete it and prepare again"
    ):
        open_document_table(folder, load_manifest(folder))
    path.unlink()
    with pytest.raises(
        DataError,
        match=r"documents\.arrow: is missing, and the manifest names it; copy it from where the folder was prepared, or prepare again",
    ):
        open_document_table(folder, load_manifest(folder))
    prepared_folder(tmp_path, {"a.jsonl": texts(20)})
    assert path.read_bytes() == content


def test_a_folder_of_old_has_none(tmp_path: Path) -> None:
    prepared = Prepared(as_of_old(prepared_folder(tmp_path, {"a.jsonl": texts(20)})))
    assert prepared.table is None
    document = prepared.document("train", 1)
    assert (document.name, document.source) == ("", "") and np.all(document.lengths > 0)
