"""Vocabulary training and encoding, against the tokenizers library on running text."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tracemalloc
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from overnight.corpus import tokenizer as tk
from overnight.corpus.word_counts import WordCounts
from overnight.errors import DataError
from tests.conftest import ROOT

ALPHABET = [*"aabbcdeé ", "##a", "[MASK]", ".", ",", "-", "中", "İ", "\u0301", "Σ", "ß", "`", "\ue000"]


def _words(seed: int) -> WordCounts:
    rng = random.Random(seed)
    return WordCounts.of(Counter("".join(rng.choices("abcdefgh", k=rng.randint(1, 7))) for _ in range(3000)))


def test_training_is_the_same_in_another_process_with_other_threads() -> None:
    # Random letters make hundreds of ties, which the trainer alone settles differently each time.
    code = (
        "import json, sys\nfrom overnight.corpus import tokenizer as tk\nfrom overnight.corpus.word_counts import WordCounts\n"
        "print(tk.train_tokens(WordCounts.of(json.load(sys.stdin)), 600))"
    )
    words, outputs = json.dumps(dict(_words(0).items())), set()
    for parallel in ("true", "false"):
        env = os.environ | {"TOKENIZERS_PARALLELISM": parallel, "PYTHONHASHSEED": "1" if parallel == "true" else "2"}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, input=words, capture_output=True, text=True, check=True)
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert outputs == {f"{tk.train_tokens(_words(0), 600)}\n"}


def test_the_trainer_is_given_the_most_frequent_words(monkeypatch: pytest.MonkeyPatch) -> None:
    words = _words(1)
    frequent = WordCounts.of(dict(sorted(words.items(), key=lambda item: (-item[1], item[0]))[:300]))
    monkeypatch.setattr(tk, "TRAINING_DISTINCT", 300)
    few = tk.train_tokens(words, 600)
    monkeypatch.undo()
    assert few == tk.train_tokens(frequent, 600) != tk.train_tokens(words, 600)


def test_trained_tokens_are_specials_alphabet_and_words() -> None:
    tokens = tk.train_tokens(WordCounts.of({"hello": 50, "hell": 20, "world": 30, "!": 30, "x": 1}), 60)
    assert tuple(tokens[:5]) == tk.SPECIALS
    assert len(set(tokens)) == len(tokens) <= 60
    assert {"hello", "world", "!", "x"} <= set(tokens)


def test_words_that_are_unknown_for_their_length_have_no_part_in_the_vocabulary() -> None:
    words = {f"word{number}": 9 for number in range(50)}
    tokens = tk.train_tokens(WordCounts.of(words), 200)
    # Of a trainer that read it, 50,000 letters would take seconds and pieces such as `##acgt`.
    assert tk.train_tokens(WordCounts.of(words | {"acgt" * 12_500: 40, "z" * 101: 40}), 200) == tokens
    assert {"z", "##z"} < set(tk.train_tokens(WordCounts.of({"z" * 100: 40}), 20))
    assert tk.train_tokens(WordCounts.of({"z" * 101: 40}), 20) == list(tk.SPECIALS)


def test_a_script_of_many_characters_has_those_that_cover_the_text_and_half_of_the_vocabulary_at_most() -> None:
    # As in Chinese, each character is a word; their frequencies fall like those of words.
    words = WordCounts.of({chr(0x4E00 + number): 300_000 // (number + 10) for number in range(6000)})
    wide, narrow = tk.train_tokens(words, 21_128), tk.train_tokens(words, 4000)
    tokens = set(wide)
    known = sum(count for word, count in words.items() if word in tokens)
    assert 0.9995 <= known / words.total() < 0.9997
    assert len(narrow) == 5 + 2000
    # Of an alphabet the rare characters are no tokens: the thousand most frequent cover the text.
    letters = WordCounts.of({chr(0x61 + number): 100_000 for number in range(26)} | {chr(0x4E00 + number): 1 for number in range(1100)})
    assert len(tk.train_tokens(letters, 30_522)) == 5 + 1000


def _lines(parts: list[str]) -> str:
    return "\n".join(" ".join(line.split()) for line in "".join(parts).split("-"))


@pytest.fixture(scope="module")
def tokens() -> list[str]:
    return [
        *tk.SPECIALS,
        "##a",
        "##b",
        "##c",
        "##d",
        "##e",
        "##k",
        "##s",
        *"abcdeks.,-#`[]",
        "ab",
        "##cd",
        "mask",
        "##ed",
        "\u03c3",
        "ß",
        "中",
    ]


@settings(max_examples=300, deadline=None)
@given(
    docs=st.lists(st.lists(st.sampled_from(ALPHABET), max_size=40).map(_lines), max_size=4),
    lowercase=st.booleans(),
    block=st.sampled_from([1, 9, 1 << 20]),
)
def test_encoding_word_by_word_equals_the_library_on_sentences(tokens: list[str], docs: list[str], lowercase: bool, block: int) -> None:
    tokenizer = tk.build_tokenizer(tokens, lowercase)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tk, "_BLOCK", block)
        tokens, lengths, counts = tk.Encoder(tokenizer).encode(docs)
    tokenizer.encode_special_tokens = True
    expected = [[tokenizer.encode(line, add_special_tokens=False).ids for line in doc.split("\n")] for doc in docs]
    filled = [[ids for ids in doc if ids] for doc in expected]
    assert tokens.tolist() == [i for doc in filled for ids in doc for i in ids]
    assert lengths.tolist() == [len(ids) for doc in filled for ids in doc]
    assert counts.tolist() == [len(doc) for doc in filled]
    assert tokens.dtype == np.uint16
    assert not np.isin(tokens, [0, 2, 3, 4]).any()  # no text makes a special piece, [UNK] aside


# No two marks that change places: where they do, the library is a character or two off.
@given(st.text(st.sampled_from("aeéàệ가나ד中 .\u0301\u1100\u1161"), max_size=40))
def test_a_cased_vocabulary_reads_every_normal_form_alike_and_finds_the_places_in_the_text_as_it_was_written(text: str) -> None:
    composed = unicodedata.normalize("NFC", text)
    tokens = sorted({char for char in composed if not char.isspace()})
    pieces = [*tk.SPECIALS, *tokens, *(f"##{token}" for token in tokens)]
    reader, plain = tk.build_tokenizer(pieces, False, compose=True), tk.build_tokenizer(pieces, False)
    expected = plain.encode(composed).ids
    for form in ("NFC", "NFD"):
        written = unicodedata.normalize(form, text)
        found = reader.encode(written)
        assert found.ids == expected
        # A character that was put together stands where its first part does.
        firsts = [written[start] for start, _ in found.offsets[1:-1]]
        assert firsts == [unicodedata.normalize(form, token.removeprefix("##"))[0] for token in found.tokens[1:-1]]


def test_a_vietnamese_word_with_its_accents_apart_is_no_unknown_token(tmp_path: Path) -> None:
    word = "việt"
    tk.save_tokenizer(tmp_path, [*tk.SPECIALS, word], lowercase=False)
    apart = unicodedata.normalize("NFD", word)
    assert apart != word
    assert tk.load_tokenizer(tmp_path).encode(apart, add_special_tokens=False).tokens == [word]


def test_saved_and_loaded_again(tmp_path: Path, tokens: list[str]) -> None:
    tk.save_tokenizer(tmp_path, tokens, lowercase=False)
    vocabulary = tk.load_vocabulary(tmp_path)
    assert (vocabulary.size, vocabulary.pad, vocabulary.mask, vocabulary.lowercase) == (len(tokens), 0, 4, False)
    assert vocabulary.continuation.sum() == sum(token.startswith("##") for token in tokens)
    assert vocabulary.is_special.nonzero()[0].tolist() == [0, 1, 2, 3, 4]
    assert vocabulary.hash != tk.vocabulary(tokens, lowercase=True).hash
    encoded = tk.load_tokenizer(tmp_path).encode("ab a", "[MASK]")
    assert encoded.tokens == ["[CLS]", "ab", "a", "[SEP]", "[MASK]", "[SEP]"]


def test_special_tokens_are_found_by_name_in_a_given_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("x\n[SEP]\n[CLS]\n[MASK]\n[UNK]\n[PAD]\n\u2028\n")
    vocabulary = tk.vocabulary(tk.read_tokens(tmp_path / "v.txt"), True)
    assert (vocabulary.pad, vocabulary.unk, vocabulary.cls, vocabulary.sep, vocabulary.mask, vocabulary.size) == (5, 4, 2, 1, 3, 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nx\n", r"has no \[MASK\]"),
        (b"[PAD]\n\nx\n", ":2: is empty"),
        (b"a\nb\na\n", ":3: repeats 'a' of line 1"),
        (b"a\n\xff\n", "byte 2 is not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_bad_vocabulary_files_are_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "v.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        tk.read_tokens(tmp_path / "v.txt")


def test_wide_tokens_only_for_large_vocabularies() -> None:
    assert tk.token_dtype(65_536) is np.uint16
    assert tk.token_dtype(65_537) is np.uint32


@given(
    docs=st.lists(st.lists(st.sampled_from([*ALPHABET, "B", "\u2019", "_"]), max_size=40).map(_lines), max_size=4), lowercase=st.booleans()
)
def test_words_and_marks_are_counted_as_the_library_splits_text_in_the_order_in_which_they_first_occur(
    docs: list[str], lowercase: bool
) -> None:
    normalizer, splitter = tk.build_tokenizer(tk.SPECIALS, lowercase).normalizer, pre_tokenizers.BertPreTokenizer()
    words = (word for doc in docs for word in doc.split())
    expected = Counter(part for word in words for part, _ in splitter.pre_tokenize_str(normalizer.normalize_str(word)))
    assert list(tk.count_words(docs, lowercase).items()) == list(expected.items())


def test_an_encoder_remembers_a_word_of_many_pieces_in_little_more_memory_than_one_of_few(tokens: list[str]) -> None:
    def held(length: int) -> int:
        encoder = tk.Encoder(tk.build_tokenizer(tokens, True))
        words = " ".join("".join(random.Random(number).choices("abcd", k=length)) for number in range(2000))
        encoder.encode(["a"])
        tracemalloc.start()
        encoder.encode([words])
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size // len(set(words.split()))

    assert held(40) - held(20) < 20 * 7  # a letter and 4 bytes for its id, not 40


def test_what_an_encoder_remembers_is_bounded_and_changes_no_token(tokens: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [f"a{i} b{i % 3},\ncd, ab" for i in range(40)]
    once = [tk.Encoder(tk.build_tokenizer(tokens, True)).encode([text])[0].tolist() for text in documents]
    monkeypatch.setattr(tk, "_REMEMBERED", 8)
    encoder = tk.Encoder(tk.build_tokenizer(tokens, True))
    sizes = []
    for text, expected in zip(documents, once, strict=True):
        assert encoder.encode([text])[0].tolist() == expected
        sizes.append(len(encoder._ids))
    assert max(sizes) <= 8 + 10 < len({word for text in documents for word in text.split()})
