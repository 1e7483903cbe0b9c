"""Bits per character of whole words: the same words for every vocabulary, and the bits of a code that could be decoded."""

from __future__ import annotations

import io
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from overnight.batches.packing import Batch
from overnight.console import Line
from overnight.corpus.tokenizer import build_tokenizer
from overnight.evaluation import whole_words
from overnight.evaluation.masked_lm import plain_tokenizer
from overnight.evaluation.texts import Text
from overnight.evaluation.whole_words import word_score
from tests.evaluation.sample import SPECIALS, TOKENS, TableLM
from tests.evaluation.test_masked import byte_level

LETTERS = [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz.,", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
NOVEL = "the cat and the dog sleep. "


def scored(model: Any, text: Text) -> Any:
    return word_score(model, text, Line(io.StringIO()))


def table(tokens: list[str], log_p: Any, longest: int = 128) -> TableLM:
    model = TableLM(log_p, tokens)
    model.longest, model.batch_tokens = longest, 1000  # type: ignore[misc]
    return model


class Recorded(TableLM):
    """A table that keeps what it is asked: the tokens of a sequence as it sees them, a place there, and the token that is wanted."""

    def log_probabilities(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return those of the table."""
        assert batch.predicted_M is not None
        starts = batch.starts.tolist()
        for at, label in zip(batch.predicted_M.tolist(), batch.targets["mlm"].tolist(), strict=True):
            start = max(s for s in starts if s <= at)
            sequence = batch.ids_N[start : starts[starts.index(start) + 1]].tolist()
            self.asked.append(([LETTERS[i] for i in sequence], at - start, LETTERS[label]))
        return super().log_probabilities(batch)

    asked: list[tuple[list[str], int, str]]


def test_vocabularies_that_give_a_word_the_same_probability_have_the_same_bits() -> None:
    """A model of words and one of letters know of each word only how likely it is among all; the code of the letters tells their number by the frequency of that."""
    words = ["cat", "dog", "sun", "ice"]
    text = Text("x", [" ".join(words[(i * i + i // 3) % 4] for i in range(600)) for _ in range(8)])
    whole = scored(table([*SPECIALS, *words], lambda ids, at: -math.log(4)), text)
    # All have three letters, so that nothing is to be paid for the number of them.
    letters = scored(table(LETTERS, lambda ids, at: -math.log(4) / 3), text)
    assert whole.hidden_words == letters.hidden_words > 100
    # 2 bits a word of four characters, the first of a passage of three.
    assert whole.word_bits_per_character == pytest.approx(2 / 4, rel=5e-3)
    assert letters.word_bits_per_character == pytest.approx(whole.word_bits_per_character, rel=1e-6)


def test_the_number_of_tokens_is_paid_for_by_its_frequency() -> None:
    words = ["a", "bcd"] * 300
    text = Text("x", [" ".join(words)])
    found = scored(table(LETTERS, lambda ids, at: 0.0), text)  # who knows every letter once it is told how many there are
    assert found.hidden_words == pytest.approx(0.15 * 600, rel=0.3) and found.word_standard_error is None
    assert found.word_bits_per_character == found.split_bits_per_character == pytest.approx(1 / 3, rel=0.2)  # a bit for 2 or 4 characters
    assert scored(table([*SPECIALS, "a", "bcd"], lambda ids, at: 0.0), text).word_bits_per_character == 0


def test_the_bits_of_all_words_are_those_of_their_tokens_and_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_words, "RATE", 1.0)
    text = Text("x", [NOVEL * 7, "unseen", "unseen", "unseen", "i saw a dog, a cat."])
    found = scored(table(LETTERS, lambda ids, at: -0.25 * ids[at], longest=40), text)
    words = [word for passage in text.passages[::4] for word in passage.replace(",", " ,").replace(".", " .").split()]
    sizes = Counter(map(len, words))
    tokens = [letter if i == 0 else f"##{letter}" for word in words for i, letter in enumerate(word)]
    nats = sum(0.25 * LETTERS.index(token) for token in tokens) - sum(math.log(sizes[len(word)] / len(words)) for word in words)
    assert found.hidden_words == len(words)
    characters = sum(len(passage.rstrip()) for passage in text.passages[::4])
    assert found.word_bits_per_character == pytest.approx(nats / math.log(2) / characters, rel=1e-6)


def test_a_word_is_told_token_by_token_while_the_others_stay_hidden() -> None:
    model = Recorded(lambda ids, at: -1.0, LETTERS)
    model.longest, model.batch_tokens, model.asked = 40, 90, []  # type: ignore[misc]
    found = scored(model, Text("x", [NOVEL * 40]))
    firsts = [asked for asked in model.asked if not asked[2].startswith("##")]
    assert len(firsts) == found.hidden_words > 20
    words = Counter[str]()
    for sequence, at, wanted in firsts:
        # Nothing of any hidden word can be seen yet, and a hidden one is hidden to its end.
        assert sequence[at] == "[MASK]" and all(sequence[i - 1] != "[MASK]" for i, token in enumerate(sequence) if token.startswith("##"))
        words[wanted] += 1
    for sequence, at, wanted in model.asked:
        assert sequence[at] == "[MASK]"
        if wanted.startswith("##"):
            start = max(i for i in range(at) if not sequence[i].startswith("##"))
            told = sequence[start:at]
            assert "[MASK]" not in told and NOVEL.count("".join([*told, wanted]).replace("##", ""))
    # As many second letters as words of two or more: all but the stops.
    assert sum(asked[2].startswith("##") for asked in model.asked) >= 2 * (len(firsts) - words["."])


UNITS = st.lists(st.sampled_from(["cat", "dogs", "a", "sleep", ".", ",", "-", "_", "Éa", "中", "文", "x1"]), min_size=1, max_size=60)
TOKENIZERS: list[Tokenizer] = [
    *(build_tokenizer(tokens, True) for tokens in (LETTERS, [*SPECIALS, "cat", "dog", "##s", "sleep", *"abcdefgx.,-", "##p", "##1"])),
    build_tokenizer(TOKENS, False),
    byte_level(),
]


@given(units=UNITS, gaps=st.integers(0, 2**60), number=st.integers(0, 3))
def test_the_same_words_are_hidden_whatever_the_tokens(units: list[str], gaps: int, number: int) -> None:
    text = "".join(unit + " " * (gaps >> i & 1) for i, unit in enumerate(units)).strip()
    hidden = []
    for tokenizer in map(plain_tokenizer, TOKENIZERS):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        found = whole_words._words(text, number, np.array(encoding.offsets).reshape(-1, 2), 1000)
        assert found.characters.sum() == len(text) and found.sizes.min() > 0 and found.sizes.sum() == len(encoding.ids)
        hidden.append((found.characters.tolist(), found.hidden.tolist()))
    assert all(each == hidden[0] for each in hidden)


def test_words_that_a_token_joins_are_one() -> None:
    # "it", "s.", and with the space before each "a" and "dog".
    offsets = np.array([[0, 2], [2, 4], [4, 6], [6, 10]])
    found = whole_words._words("its. a dog", 0, offsets, 10)
    assert found.characters.tolist() == [4, 2, 4] and found.sizes.tolist() == [2, 1, 1]


def test_words_that_no_sequence_holds_or_that_are_longer_than_words_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_words, "RATE", 1.0)
    found = scored(table(LETTERS, lambda ids, at: -1.0, longest=12), Text("x", ["abcdefghijklmnop cat " + "z" * 31]))
    assert found.hidden_words == 1
    assert scored(table(LETTERS, lambda ids, at: -1.0), Text("x", ["z" * 31])) is None
    assert scored(table(LETTERS, lambda ids, at: -1.0), Text("x", ["\u200b"])) is None


def test_a_word_that_fits_is_in_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_words, "RATE", 1.0)
    model = Recorded(lambda ids, at: -1.0, LETTERS)
    model.longest, model.batch_tokens, model.asked = 14, 90, []  # type: ignore[misc]
    scored(model, Text("x", ["abcdefghij klm"]))  # 13 tokens in sequences of 12: two of 7 and 6 would cut the first word
    assert {len(sequence) for sequence, _, _ in model.asked} == {12, 5}
    asked = [wanted.lstrip("#") for _, _, wanted in model.asked]
    assert ["".join(letter for letter in asked if letter in word) for word in ("abcdefghij", "klm")] == ["abcdefghij", "klm"]


def test_a_sequence_ends_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = table(LETTERS, lambda ids, at: -1.0, longest=20)
    monkeypatch.setattr(whole_words, "RATE", 1.0)
    scored(model, Text("x", [NOVEL * 9]))
    first = [LETTERS.index(letter) for letter in "tcads."]
    assert max(map(len, model.sequences)) <= 20
    assert all(sequence[1] in (model.vocabulary.mask, *first) for sequence in model.sequences)


def test_batches_change_nothing() -> None:
    found = []
    for tokens in (1, 60, 10_000):
        model = table(LETTERS, lambda ids, at: -0.1 * ids[at], longest=30)
        model.batch_tokens = tokens  # type: ignore[misc]
        found.append(scored(model, Text("x", [NOVEL * n for n in range(1, 20)])))
    assert found[0] == found[1] == found[2]


def test_the_standard_error_is_that_of_passages_drawn_anew() -> None:
    generator = np.random.default_rng(0)
    characters = generator.integers(50, 150, 400)
    bits = characters * 2.0 + generator.normal(0, 30, 400)
    ratio, error = whole_words._ratio(bits, characters)
    drawn = [(bits[rows].sum() / characters[rows].sum()) for rows in generator.integers(0, 400, (2000, 400))]
    assert ratio == bits.sum() / characters.sum() and error == pytest.approx(np.std(drawn), rel=0.1)
    assert whole_words._ratio(np.array([3.0, 0.0]), np.array([2, 0])) == (1.5, None)
