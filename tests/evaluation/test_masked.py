"""Bits per character: every character belongs to one token, masks are the same for every model, and the sums are those of the formula."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from overnight.console import Line
from overnight.corpus.tokenizer import build_tokenizer, load_tokens
from overnight.errors import DataError
from overnight.evaluation import masked
from overnight.evaluation.masked import covered_characters, masked_score
from overnight.evaluation.masked_lm import plain_tokenizer
from overnight.evaluation.texts import Text
from tests.conftest import topics
from tests.evaluation.sample import SPECIALS, TOKENS, TableLM

CHARACTERS = "abc ABC éßﬁ中文,.-'\u00a0\u200b\u0301😀[MASK]"


def byte_level() -> Tokenizer:
    """A tokenizer whose tokens are bytes, of which several may be of one character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


TOKENIZERS = [*(build_tokenizer([*SPECIALS, *"abcé", "##b", "##a"], lowercase) for lowercase in (True, False)), byte_level()]


@given(text=st.text(st.sampled_from(CHARACTERS) | st.characters(codec="utf-8"), max_size=60), which=st.sampled_from(range(len(TOKENIZERS))))
def test_the_characters_that_tokens_cover_sum_to_the_text(text: str, which: int) -> None:
    encoding = plain_tokenizer(TOKENIZERS[which]).encode(text, add_special_tokens=False)
    if encoding.ids:
        covered = covered_characters(np.array([end for _, end in encoding.offsets]), len(text))
        assert covered.sum() == len(text) and covered.min() >= 0 and len(covered) == len(encoding.ids)


def test_a_piece_covers_its_letters_and_the_first_of_a_word_the_space_before_it() -> None:
    text = "The cats sleeping."
    encoding = plain_tokenizer(build_tokenizer((*TOKENS, "cat", "##s")[: len(TOKENS)], True)).encode(text, add_special_tokens=False)
    covered = covered_characters(np.array([end for _, end in encoding.offsets]), len(text))
    assert dict(zip(encoding.tokens, covered.tolist(), strict=True)) == {"the": 3, "cats": 5, "sleep": 6, "##ing": 3, ".": 1}


def test_the_sums_are_those_of_the_formula() -> None:
    """With 1 nat and one half right at every token, all of a text's tokens alike: the ratio is exact."""
    model, text = TableLM(lambda ids, at: -1.0), Text("x", ["the cat the cat the cat " * 5, "cat the"])
    found = masked_score(model, text, Line(io.StringIO()))
    assert found.tokens == 32 and found.characters == 127 and found.mlm_loss == 1.0 and found.unknown == 0
    assert found.bits_per_character == found.masked_tokens / found.masked_characters / math.log(2)
    assert found.masked_tokens == sum(max(1, round(0.15 * len(sequence))) for sequence in model.sequences)
    assert {len(sequence) for sequence in model.sequences} <= {4, 9, 10, 11, 12}  # nearly equal parts of a passage, 12 at most


def test_a_text_as_long_as_any_is_masked_at_15_percent_as_in_training_and_the_same_every_time(tiny_data: Path) -> None:
    tokens, _ = load_tokens(tiny_data)
    text = Text("topics", [" ".join(found.split()) for found in topics().values()])
    models = [TableLM(lambda ids, at: -0.1 * (ids[at] % 7), tokens) for _ in range(2)]
    for model in models:
        model.longest, model.batch_tokens = 512, 4096  # type: ignore[misc]
    one, two = (masked_score(model, text, Line(io.StringIO())) for model in models)
    assert one == two and models[0].sequences == models[1].sequences
    vocabulary = models[0].vocabulary
    assert max(map(len, models[0].sequences)) <= 128  # though the model takes 512
    flat = np.concatenate([np.array(s) for s in models[0].sequences])
    assert one.tokens + 2 * len(models[0].sequences) == len(flat)
    assert one.masked_tokens / len(flat) == pytest.approx(0.15, abs=0.003)
    assert (flat == vocabulary.mask).sum() / one.masked_tokens == pytest.approx(0.8, abs=0.02)
    assert one.masked_characters / one.characters == pytest.approx(one.masked_tokens / one.tokens, rel=0.05)


def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text("x", ["the cat sleeps . " * 9, "dogs bark the dog", "cat"])
    found = []
    for tokens in (1, 30, 10_000):
        model = TableLM(lambda ids, at: -float(ids[at]))
        model.batch_tokens = tokens  # type: ignore[misc]
        found.append(masked_score(model, text, Line(io.StringIO())))
    assert found[0] == found[1] == found[2]


def test_unknown_words_are_counted_and_a_text_without_tokens_is_refused() -> None:
    model = TableLM(lambda ids, at: -1.0)
    assert masked_score(model, Text("x", ["the zebra"]), Line(io.StringIO())).unknown == 6 / 9
    with pytest.raises(DataError, match="x: the tokenizer of table makes no token of it"):
        masked_score(model, Text("x", ["\u200b"]), Line(io.StringIO()))


def test_a_text_of_which_no_character_is_masked_is_refused() -> None:
    model = TableLM(lambda ids, at: -1.0)
    model.tokenizer = plain_tokenizer(byte_level())
    # Each letter is three bytes, of which the first covers it; the one that is masked is another.
    with pytest.raises(DataError, match="x: is too short to mask a character of it"):
        masked_score(model, Text("x", ["中中"]), Line(io.StringIO()))


def test_sequences_together_have_at_most_the_tokens_of_a_batch() -> None:
    assert list(masked.grouped_by_tokens([5, 3, 2, 9, 1, 1], 8)) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6)]
    assert list(masked.grouped_by_tokens([], 8)) == []
