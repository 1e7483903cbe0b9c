"""The page about a prepared folder stands alone, says what its statistics and manifest say, and cannot be broken by a text."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from overnight.config import NoFilters
from overnight.config.data import TextSource
from overnight.corpus import statistics
from overnight.corpus.shards import load_manifest, save_manifest
from overnight.download.manifest import Entry, Manifest, now, sha256_of
from overnight.errors import ConfigError, DataError, UserError
from overnight.report.data_page import refresh_data_report, write_data_report
from tests.corpus.folders import as_of_old, prepared_folder, texts
from tests.report.test_page import Page


def page_of(folder: Path) -> Page:
    return Page(write_data_report(folder, folder.parent / "page.html"))


@pytest.mark.parametrize("tokenizer", ["wordpiece", "bytes"])
def test_the_page_stands_alone_and_has_the_numbers_of_the_folder(tmp_path: Path, tokenizer: str) -> None:
    rows = texts(300)
    folder = prepared_folder(tmp_path, {"a.jsonl": [*rows[:200], rows[0], "short"], "b.jsonl": rows[200:]}, tokenizer=tokenizer)
    page, manifest = page_of(folder), load_manifest(folder)
    assert not [attributes for tag, attributes in page.tags if tag in ("script", "img", "iframe") and attributes.get("src")]
    assert page.open == [] and "Plotly" in page.scripts[0]
    for split in ("train", "valid"):
        assert f"{manifest.count(split, 'documents'):,}" in page.text and f"{manifest.count(split, 'tokens'):,}" in page.text
    for name in ("a.jsonl", "b.jsonl"):
        assert str(tmp_path / name) in page.text
    assert "1 duplicates" in page.text and "1 min_chars" in page.text and "\nshort" in page.text.replace(">", "\n")
    captions = list(page.figures)
    unit = "bytes" if tokenizer == "bytes" else "tokens"
    assert captions[0] == f"Length of documents by {unit}"
    bars = page.figures[captions[0]]["data"][0]
    assert bars["name"] == "train" and sum(bars["y"]) == pytest.approx(100)
    assert any(caption.startswith("Length of sentences") for caption in captions) == (tokenizer == "wordpiece")
    kept = page.figures[f"Sources {unit} kept"]["data"]
    assert sum(sum(trace["x"]) for trace in kept) == sum(manifest.count(split, "tokens") for split in ("train", "valid"))


def test_a_text_and_a_name_cannot_break_the_page(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><b a="'
    rows = [f"{text} &lt;script&gt;alert(1)&lt;/script&gt;" for text in texts(30)]
    folder = prepared_folder(tmp_path / "a<b>&", {"x<script>.jsonl": rows, "y.jsonl": [evil]}, tokenizer="bytes")
    page = page_of(folder)
    assert len(page.scripts) == 2 and not any("alert(1)" in script for script in page.scripts)
    assert "x<script>.jsonl" in page.text and "<script>alert(1)</script>" in page.text


def test_a_folder_of_old_without_drops_or_validation_has_a_page_that_says_so(tmp_path: Path) -> None:
    folder = as_of_old(prepared_folder(tmp_path, {"a.jsonl": texts(20)}, valid_fraction=0.0))
    (folder / "drops.json").unlink()
    text = page_of(folder).text
    assert "No document is in the validation split" in text and "before the source of each document was recorded" in text
    assert "Nothing." in text


def test_warnings_name_what_is_worth_a_look(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text(
        "".join(f"{token}\n" for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *(f"q{i}" for i in range(10))))
    )
    folder = prepared_folder(tmp_path, {"a.jsonl": texts(20)}, vocab_file=str(vocabulary), vocab_size=16)
    text = " ".join(page_of(folder).text.split())
    assert re.search(r"Scores on \d+ validation documents? of [\d,]+ tokens say little", text)
    assert re.search(r"\d\d\.\d % of the tokens of train are \[UNK\]", text)
    assert "62.5 % of the vocabulary never occurs" in text


def test_tokens_that_never_occur_are_not_counted_as_occurring_also_where_they_are_special(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    special = ["[PAD]", *(f"[unused{i}]" for i in range(4)), "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary.write_text("".join(f"{token}\n" for token in (*special, ".", "a", "b", "q")))
    folder = prepared_folder(
        tmp_path, {"a.jsonl": [f"{'a b ' * (i + 50)}ba." for i in range(20)]}, vocab_file=str(vocabulary), vocab_size=13
    )
    text = page_of(folder).text
    assert "4 of 13 occur in the training part" in text and "1 never occur" in text  # a, b, the period and [UNK] do; q does not


def test_languages_are_shares_of_all_documents_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_languages", lambda prepared: Counter({f"l{i}": 60 if i == 0 else 2 for i in range(15)}))
    text = " ".join(page_of(prepared_folder(tmp_path, {"a.jsonl": texts(20)})).text.split())
    assert "Languages of 88 training documents: l0 68.2 %," in text and "l11 2.3 %, 3 others 6.8 %." in text


def test_sources_whose_short_names_are_the_same_have_bars_of_their_own(tmp_path: Path) -> None:
    for side in "pq":
        (tmp_path / side).mkdir()
    files = [f"{side}/{'x' * 45}.jsonl" for side in "pq"]
    folder = prepared_folder(tmp_path, {file: texts(10 * seed, seed) for seed, file in enumerate(files, 1)})
    figure = page_of(folder).figures["Sources tokens kept"]
    axis = figure["layout"]["yaxis"]
    assert all(trace["y"] == axis["tickvals"] == ["1", "0"] for trace in figure["data"])
    assert len(set(axis["ticktext"])) == 1 and axis["ticktext"][0].startswith("...xx")


def test_named_sources_are_told_apart_by_their_names_also_where_they_read_one_file(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"text": f"{text} one", "more": f"{text} two"}) + "\n" for text in texts(20)))
    (tmp_path / "y.jsonl").write_text(file.read_text().replace(" one", " three").replace(" two", " four"))
    paths = {"titles": ["x"], "bodies": ["x"], "both": ["x", "y"]}
    sources = {
        name: TextSource(paths=[str(tmp_path / f"{path}.jsonl") for path in mine], field="text" if name == "titles" else "more")
        for name, mine in paths.items()
    }
    page = page_of(prepared_folder(tmp_path, {}, paths=[], sources=sources))
    for name, mine in paths.items():
        assert all(f"{name}: {tmp_path / path}.jsonl" in page.text for path in mine)
    shown = page.figures["Sources tokens kept"]["layout"]["yaxis"]["ticktext"]
    assert {"titles", "bodies"} <= set(shown)


def test_licenses_are_those_of_the_download(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, {"a.jsonl": texts(10), "b.jsonl": texts(10, seed=1)})
    file = tmp_path / "a.jsonl"
    entry = Entry("wikipedia", "https://x", file.stat().st_size, sha256_of(file), file.stat().st_mtime_ns, now(), "", "CC BY-SA 4.0", "")
    Manifest(tmp_path).add({"a.jsonl": entry})
    assert page_of(folder).text.count("CC BY-SA 4.0 (wikipedia): 1 file") == 1
    (tmp_path / "download.json").write_text("{")
    assert "CC BY-SA" not in page_of(folder).text
    file.unlink()
    page_of(folder)


def test_what_was_skipped_removed_and_lacking_is_told_of_each_source(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, {"a.jsonl": texts(20)})
    manifest = load_manifest(folder)
    changes = {"skipped_lines": 2, "licenses": 1, "other_pages": 3, "replaced": 4, "without": {"title": 5}}
    save_manifest(folder, dataclasses.replace(manifest, sources=[dataclasses.replace(manifest.sources[0], **changes)]))
    said = "2 lines skipped, 1 license removed, 3 pages of other namespaces, 4 places with U+FFFD instead of bytes that are not UTF-8, 5 documents without"
    assert said in " ".join(page_of(folder).text.split())


def test_dropped_lines_and_masked_data_are_told(tmp_path: Path) -> None:
    rows = [f"{text}\n\nCall 030 1234567 or write to a.b@example.org now.\n\nthis line has no end" for text in texts(20)]
    settings = {"mask_personal": ["email"], "filters": NoFilters(lines_end_sentences=True)}
    page = page_of(prepared_folder(tmp_path, {"a.jsonl": rows}, **settings))
    assert "Masked: 20 placeholders for email." in page.text and "20 filters.lines_end_sentences (lines)" in page.text
    assert "this line has no end" in page.text


def test_the_page_is_written_once_for_the_shards_that_are_there(tmp_path: Path) -> None:
    folder = prepared_folder(tmp_path, {"a.jsonl": texts(20)})
    assert refresh_data_report(folder) == f"data report: {folder / 'report.html'}"
    assert refresh_data_report(folder) == ""
    save_manifest(folder, dataclasses.replace(load_manifest(folder), cleaning=2))
    assert refresh_data_report(folder)
    (folder / "report.html").unlink()
    (folder / "train-00000.arrow").unlink()
    assert "train-00000.arrow" in refresh_data_report(folder) and not (folder / "report.html").exists()


@pytest.mark.parametrize("content", ["[]", '{"duplicates": ', '{"duplicates": {"count": 1, "samples": [], "checksum_of_the_rest": "0"}}'])
def test_a_page_without_the_samples_of_a_damaged_file_says_so(tmp_path: Path, content: str) -> None:
    rows = texts(20)
    folder = prepared_folder(tmp_path, {"a.jsonl": [*rows, rows[0]]})
    (folder / "drops.json").write_text(content)
    text = page_of(folder).text
    assert f"{folder / 'drops.json'}: " in text and "so this page has no samples of what was dropped" in text and "1 duplicates" in text


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepared_folder(tmp_path, {"a.jsonl": texts(20)})
    with pytest.raises(ConfigError, match=r"is a folder; name the HTML file to write"):
        write_data_report(folder, tmp_path)
    (folder / "train-00000.arrow").unlink()
    with pytest.raises(DataError, match=r"train-00000\.arrow: the shard is missing"):
        write_data_report(folder, tmp_path / "page.html")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match="the report needs jinja2: pip install"):
        write_data_report(prepared_folder(tmp_path, {"a.jsonl": texts(20)}), tmp_path / "page.html")
