"""Rows to ids: special tokens, segments, and the original's truncation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from overnight.corpus.tokenizer import build_tokenizer
from overnight.corpus.tokenizer import vocabulary as vocabulary_of
from overnight.errors import DataError
from overnight.finetune.encode import encode_examples, join, read_as_text, truncated, with_tokens, without_tokens
from overnight.finetune.question_answering import windows
from overnight.finetune.tagging import encode_sentences
from overnight.tasks.conll import Sentence
from overnight.tasks.examples import Example, TaskData
from overnight.tasks.squad import Question


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 50))
def test_truncation_is_the_originals_one_token_at_a_time(length_a: int, length_b: int, room: int) -> None:
    a, b = length_a, length_b
    while a + b > room:  # _truncate_seq_pair
        if a > b:
            a -= 1
        else:
            b -= 1
    assert truncated(length_a, length_b, room) == (a, b)


@given(st.lists(st.integers(5, 99)), st.none() | st.lists(st.integers(5, 99)), st.integers(3, 40))
def test_a_row_is_cls_a_sep_b_sep_within_the_length(a: list[int], b: list[int] | None, length: int) -> None:
    row = join(a, b, 2, 3, length)
    ids, segments = row.ids.tolist(), row.segments.tolist()
    assert row.ids.dtype == "int32" and row.segments.dtype == "int8" and len(ids) == len(segments) <= length
    assert ids[0] == 2 and ids[-1] == 3 and ids.count(3) == (1 if b is None else 2)
    first = ids.index(3) + 1
    assert segments == [0] * first + [1] * (len(ids) - first)
    assert ids[1 : first - 1] == a[: first - 2]
    if b is not None:
        assert ids[first:-1] == b[: len(ids) - first - 1]
        assert len(ids) == min(length, len(a) + len(b) + 3)


def test_singles_and_pairs_mix_and_are_tokenized_as_one_by_one(tokenizer: Tokenizer, vocabulary: Any) -> None:
    rows = [
        Example("0", "The cat", None, None),
        Example("1", "who?", "the mat", None),
        Example("2", "", "cat", None),
        Example("3", "sat", "", None),
    ]
    encoded = encode_examples(tokenizer, vocabulary, rows, 64)
    pieces = [[tokenizer.id_to_token(i) for i in e.ids] for e in encoded]
    assert pieces == [
        ["[CLS]", "the", "cat", "[SEP]"],
        ["[CLS]", "who", "?", "[SEP]", "the", "mat", "[SEP]"],
        ["[CLS]", "[SEP]", "cat", "[SEP]"],
        ["[CLS]", "sat", "[SEP]", "[SEP]"],
    ]


def test_special_pieces_in_a_text_are_text(vocabulary: Any) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "[", "]", "sep", "mask"]
    (encoded,) = encode_examples(build_tokenizer(pieces, lowercase=True), vocabulary, [Example("0", "cat [SEP]", "[MASK] cat", None)], 32)
    assert encoded.ids.tolist() == [2, 5, 6, 8, 7, 3, 6, 9, 7, 5, 3]


class BusyTokenizer:
    """A tokenizer with which another thread is at work: before 0.23 it may be read, and nothing be set."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    @property
    def encode_special_tokens(self) -> bool:
        return self.tokenizer.encode_special_tokens

    @encode_special_tokens.setter
    def encode_special_tokens(self, value: bool) -> None:
        raise RuntimeError("Already borrowed")


def test_a_tokenizer_that_other_threads_use_is_set_once_and_only_read_after_that() -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"]
    known, rows, question = vocabulary_of(pieces, True), [Example("0", "cat", None, None)], Question("q", "", "cat", "cat", ())
    tokenizer = build_tokenizer(pieces, lowercase=True)
    busy: Any = BusyTokenizer(tokenizer)
    with pytest.raises(RuntimeError, match="Already borrowed"):
        encode_examples(busy, known, rows, 8)
    read_as_text(tokenizer)
    assert encode_examples(busy, known, rows, 8)[0].ids.tolist() == [2, 5, 3]
    assert encode_sentences(busy, known, [Sentence("0", ("cat",), None)], [], 8)[0].ids.tolist() == [2, 5, 3]
    assert windows(busy, known, [question], 8, 4)[0].ids.tolist() == [2, 5, 3, 5, 3]


def test_more_rows_than_one_batch_keep_their_order(tokenizer: Tokenizer, vocabulary: Any) -> None:
    rows = [Example(str(i), str(i), str(-i) if i % 2 else None, None) for i in range(9000)]
    encoded = encode_examples(tokenizer, vocabulary, rows, 32)
    for i in (0, 1, 4095, 4096, 8999):
        assert (encode_examples(tokenizer, vocabulary, [rows[i]], 32)[0].ids == encoded[i].ids).all()
    assert len(encoded) == 9000


DROPPED = "\u200b\ufffd\x07 "


@given(st.lists(st.tuples(st.text("aé." + DROPPED, max_size=3) | st.text(max_size=3), st.none() | st.text("b," + DROPPED, max_size=2))))
def test_rows_without_tokens_are_those_that_are_encoded_by_special_tokens_alone(texts: list[tuple[str, str | None]]) -> None:
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    tokenizer = build_tokenizer(pieces, lowercase=True)
    rows = [Example(str(i), *pair, None) for i, pair in enumerate(texts)]
    encoded = encode_examples(tokenizer, vocabulary_of(pieces, True), rows, 64)
    alone = [i for i, (row, e) in enumerate(zip(rows, encoded, strict=True)) if len(e.ids) == (2 if row.text_b is None else 3)]
    assert without_tokens(tokenizer, rows) == alone


def test_training_rows_without_tokens_are_left_out_with_those_that_belong_to_them_and_counted(tokenizer: Tokenizer) -> None:
    rows = [Example(str(i), text, None, "x") for i, text in enumerate(["cat", "\u200b", "mat", "sat", "", "cat"])]
    task = TaskData("csv", "classification", ("x", "y"), rows, rows[:2], [], "accuracy", notes=("said before",))
    left = with_tokens(tokenizer, task)
    assert [row.id for row in left.train] == ["0", "2", "3", "5"] and left.dev == task.dev
    assert left.notes == (
        "said before",
        "2 of 6 training rows have no token (ids '1', '4'): not trained on",
        "1 of 2 dev rows have no token (ids '1'): answered as an empty text",
    )
    assert [row.id for row in with_tokens(tokenizer, replace(task, rows_together=2)).train] == ["2", "3"]
    whole = replace(task, train=rows[:1], dev=[])
    assert with_tokens(tokenizer, whole) == whole
    with pytest.raises(DataError, match=r"1 of 1 training rows have no token \(ids '1'\): not trained on; the tokenizer"):
        with_tokens(tokenizer, replace(task, train=rows[1:2]))
