"""The text of a comparison is the same for every model: cleaned, without doubles, a sample of all of it, bounded."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.config import Data
from overnight.corpus.clean import clean
from overnight.corpus.sentences import sentences
from overnight.corpus.tokenizer import SPECIALS, Encoder, build_tokenizer, load_tokenizer
from overnight.errors import DataError
from overnight.evaluation import texts
from overnight.evaluation.texts import sample, text_of_files, text_of_shards
from tests.conftest import topics


def test_raw_text_is_cleaned_as_preparation_does_and_equal_passages_count_once(tmp_path: Path) -> None:
    document = "# A *title*\n\nOne sentence. And &amp; another one!\n\nA   paragraph."
    (tmp_path / "a.md").write_text(document)
    (tmp_path / "b.md").write_text(document + "\n")
    found = text_of_files(Data(paths=[str(tmp_path)]), texts.MAX_TOKENS)
    assert found.passages == [" ".join(sentences(clean(document)))] == ["A title One sentence. And & another one! A paragraph."]
    assert found.characters == len(found.passages[0]) and found.name == str(tmp_path)


ANY = st.text(st.sampled_from("aB1. !?\n一二。！」）”かカ.กา।é") | st.characters(codec="utf-8"), max_size=80)


@given(text=ANY, longest=st.integers(2, 30))
def test_passages_are_their_text_with_a_space_for_the_end_of_a_paragraph(text: str, longest: int) -> None:
    cleaned = clean(text)
    rest = cleaned.replace("\n\n", " ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "PASSAGE_CHARACTERS", longest)
        for passage in texts._passages(cleaned):
            assert rest.removeprefix(" ").startswith(passage)
            rest = rest.removeprefix(" ").removeprefix(passage)
    assert not rest.strip()


@pytest.mark.parametrize(
    "text",
    [
        "他来了。“你好！”她说。\n\n那本书很好看。他走了。",
        "彼は来た。「こんにちは。」と言った。\n\nその本は面白い。帰った！",
        "เขามาแล้ว เธอพูดว่าสวัสดี\n\nหนังสือเล่มนี้ดีมาก",
        "He came. “Hello!” she said.\n\nThe book is good. He left.",
    ],
)
def test_no_space_is_added_between_sentences_and_the_tokens_are_those_of_the_sentences(text: str) -> None:
    (passage,) = texts._passages(clean(text))
    assert passage == text.replace("\n\n", " ")
    letters = sorted({*passage.lower()} - {" "})
    tokenizer = build_tokenizer([*SPECIALS, *letters, *(f"##{letter}" for letter in letters)], lowercase=False)
    parted, whole = (tokenizer.encode(written.lower()).ids for written in (" ".join(sentences(clean(text))), passage))
    assert whole == parted and tokenizer.token_to_id("[UNK]") not in whole


def test_a_large_text_is_sampled_from_all_of_its_parts_and_more_keeps_the_less(tiny_data: Path) -> None:
    source = Data(paths=[str(tiny_data.parent / "topics.jsonl")])
    everything, less, more = (text_of_files(source, n).passages for n in (10**6, 10_000, 20_000))
    assert set(less) < set(more) < set(everything) and less == text_of_files(source, 10_000).passages
    assert 40_000 <= sum(map(len, less)) < 40_000 + 2 * max(map(len, everything))
    places = [everything.index(passage) for passage in less]
    assert places == sorted(places) and places[0] < len(everything) / 4 and places[-1] > len(everything) * 3 / 4
    assert all(len(passage) < 2000 + 1 + max(map(len, sentences(passage))) for passage in everything)


def test_a_text_of_another_number_of_tokens_or_called_as_a_split_has_a_name_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("notes", "valid"):
        Path(name).mkdir()
        (Path(name) / "a.txt").write_text("One sentence. And another one!")
    named = [text_of_files(Data(paths=[name]), most).name for name in ("notes", "valid") for most in (texts.MAX_TOKENS, 5000)]
    assert named == ["notes", "notes, 5,000 tokens", "./valid", "./valid, 5,000 tokens"]


def test_prepared_data_gives_its_normalized_text_but_for_sentences_with_unknown_tokens(tiny_data: Path) -> None:
    found, tokenizer = text_of_shards(tiny_data, "valid"), load_tokenizer(tiny_data)
    (known, *_), wanted = Encoder(tokenizer).encode(found.passages), set("".join(topics().values()).lower())
    assert found.name == "valid" and tokenizer.token_to_id("[UNK]") not in known
    assert "[UNK]" not in " ".join(found.passages) and set("".join(found.passages)) <= wanted | {" "}
    short, train = text_of_shards(tiny_data, "valid", 3000), text_of_shards(tiny_data, "train", 3000)
    assert short.name == "valid, 3,000 tokens"
    assert set(short.passages) < set(found.passages)
    # Without the sentences that have an unknown token, two documents may be the same one sentence.
    assert all(len(passage) < 200 for passage in set(short.passages) & set(train.passages))


def test_decoded_text_gives_back_the_tokens_of_the_shards(tiny_data: Path) -> None:
    from overnight.corpus.shards import open_shards

    tokenizer, tokens = load_tokenizer(tiny_data), []
    unknown = tokenizer.token_to_id("[UNK]")
    for shard in open_shards(tiny_data, "valid"):
        starts = shard.sentence_starts.tolist()
        split_up = [shard.tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]
        tokens += [token for part in split_up if unknown not in part for token in part]
    found, *_ = Encoder(tokenizer).encode(text_of_shards(tiny_data, "valid", 10**6).passages)
    assert found.tolist() == tokens


def test_sources_without_text_are_refused_by_the_option_that_names_them_and_so_are_bytes(tmp_path: Path, tiny_data: Path) -> None:
    with pytest.raises(DataError, match="there is no such file or folder; correct --text"):
        text_of_files(Data(paths=[str(tmp_path / "no.txt")]), 10)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(DataError, match="holds no text to predict; name another with --text"):
        text_of_files(Data(paths=[str(tmp_path / "empty.txt")]), 10)
    (tmp_path / "nothing.txt").write_text("")
    with pytest.raises(DataError, match=r"holds no text; correct --text or data\.format"):
        text_of_files(Data(paths=[str(tmp_path / "nothing.txt")]), 10)
    with pytest.raises(DataError, match="test: holds no text to predict; name another with --text"):
        text_of_shards(tiny_data, "test", 10)
    with pytest.raises(DataError, match="is missing, so the folder is not prepared"):
        text_of_shards(tmp_path, "valid", 10)
    manifest = json.loads((tiny_data / "manifest.json").read_text())
    manifest["settings"]["tokenizer"] = "bytes"
    del manifest["checksum_of_the_rest"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="holds bytes, prepared for a byte model"):
        text_of_shards(tmp_path, "valid", 10)


def test_a_sample_takes_the_least_hashes_until_the_size() -> None:
    items = [(str(i).encode(), 1 + i % 3, i) for i in range(100)]
    by_hash = sorted(items, key=lambda item: texts.xxhash.xxh3_64_intdigest(item[0]))
    for most in (1, 7, 50, 10**9):
        wanted, total = [], 0
        for _, size, item in by_hash:
            if total >= most:
                break
            wanted.append(item)
            total += size
        assert sample([*items, *items], most) == sorted(wanted)
