"""Filters: each rule of Gopher and C4 by a text that breaks it and one that does not, against the plainest counting of repetitions."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.config import Data, Filters, NoFilters, WebFilters
from overnight.corpus.drops import SAMPLE_CHARS, SAMPLES, Drops
from overnight.corpus.filters import kept_lines, rejection
from overnight.corpus.text import Outcome, counted, kept_text, outcome_lines

GOOD = "The river rose in the night, and it took a bridge with it. Nobody had thought that one storm could do so much to the old town."


def only(**rules: Any) -> Filters:
    """Filters of which only these are on."""
    return dataclasses.replace(NoFilters(), **rules)


def rejected(text: str, **rules: Any) -> str:
    return rejection(text, [line for line in text.split("\n") if line], only(**rules))


RULES = [
    ({"max_chars": 130}, GOOD * 2, "max_chars"),
    ({"min_words": 20}, "The river rose.", "min_words"),
    ({"max_words": 30}, GOOD * 2, "max_words"),
    ({"min_sentences": 2}, "The river rose in the night", "min_sentences"),
    ({"min_mean_word_length": 3.0}, "a b c d e f to be or so", "min_mean_word_length"),
    ({"max_mean_word_length": 10.0}, "Donaudampfschifffahrtsgesellschaft Hottentottenpotentat", "max_mean_word_length"),
    ({"min_letters": 0.7}, "1 2 3 4 one", "min_letters"),
    ({"max_symbols": 0.2}, "a | b | c | d", "max_symbols"),
    ({"max_symbols": 0.2}, "é | ü | ß | ł", "max_symbols"),
    ({"min_words_with_letters": 0.8}, "4 8 15 16 23 42 the numbers", "min_words_with_letters"),
    ({"max_hashes_per_word": 0.1}, "so much #rain #storm today", "max_hashes_per_word"),
    ({"max_hashes_per_word": 0.1}, "well... then… he went home", "max_hashes_per_word"),
    ({"min_stop_words": 2}, "buy cheap shoes online now The Shoes", "min_stop_words"),
    ({"max_bullet_lines": 0.9}, "\n".join(["- one", "• two", "* three", "– four", "+ five"]), "max_bullet_lines"),
    ({"max_ellipsis_lines": 0.3}, "\n".join(["Read more...", "Next…", "One.", "Two.", "Three."]), "max_ellipsis_lines"),
    ({"max_repeated_lines": 0.3}, "Home\nNews\nHome\nHome", "max_repeated_lines"),
    ({"max_repeated_line_chars": 0.2}, "Subscribe to the letter\nNo\nYes\nSubscribe to the letter", "max_repeated_line_chars"),
    ({"max_top_ngrams": (0.2, 1.0, 1.0)}, "best shoes here and best shoes there, best shoes", "max_top_ngrams.2"),
    ({"max_top_ngrams": (1.0, 1.0, 0.16)}, "one two three four five one two three four six", "max_top_ngrams.4"),
    ({"max_repeated_ngrams": (0.15, 1.0, 1.0, 1.0, 1.0, 1.0)}, "a b c d e f g h i a b c d e", "max_repeated_ngrams.5"),
    ({"max_repeated_ngrams": (1.0, 1.0, 1.0, 1.0, 1.0, 0.1)}, "a b c d e f g h i j k a b c d e f g h i j", "max_repeated_ngrams.10"),
]


@pytest.mark.parametrize(("rules", "text", "reason"), RULES)
def test_a_rule_rejects_what_breaks_it_and_only_that(rules: dict[str, Any], text: str, reason: str) -> None:
    assert rejected(text, **rules) == reason
    assert rejected(text) == ""
    assert rejected(GOOD, **rules) == ""


def test_a_document_with_just_as_many_as_a_rule_allows_stays() -> None:
    characters, words = len(GOOD), len(GOOD.split())
    assert rejected(GOOD, max_chars=characters, min_words=words, max_words=words, min_sentences=2) == ""
    for rule, value in (("max_chars", characters - 1), ("min_words", words + 1), ("max_words", words - 1), ("min_sentences", 3)):
        assert rejected(GOOD, **{rule: value}) == rule


def test_vowel_signs_are_no_symbols() -> None:
    assert rejected("हिन्दी की किताबें", max_symbols=0.0, min_letters=1.0) == ""


def test_the_preset_keeps_prose_and_drops_a_page_of_links() -> None:
    prose = f"{GOOD} On the second day the mayor came with a boat and asked those who lived at the harbor to leave, but most of them stayed where they had been born. Later they were glad."
    assert rejection(prose, [prose], WebFilters()) == ""
    page = "\n".join(f"Category {number}" for number in range(40))
    assert rejection(page, page.split("\n"), WebFilters()) != ""


def test_lines_that_are_no_sentences_go_and_are_counted() -> None:
    drops = Drops()
    lines = [
        "Home | News | Contact us now",
        "He came.",
        "Read more about it...",
        "It rained. He went home and",
        '"So it goes," he said, "on and on"',
    ]
    assert kept_lines(lines, only(lines_end_sentences=True), "x", drops) == lines[1:2] + lines[3:]
    assert kept_lines(lines, only(min_words_per_line=4), "x", drops) == [lines[0], *lines[2:]], "a line of four words is long enough"
    assert drops.counts == {"filters.lines_end_sentences (lines)": 2, "filters.min_words_per_line (lines)": 1}


@pytest.mark.parametrize("last", ["", "Home\n\n"])
def test_a_line_that_is_left_out_joins_no_paragraphs(last: str) -> None:
    text = f"{last}It was a very good product for me.\nWould buy it again\n\nThe second paragraph is another thought."
    kept = kept_text(text, "x", Data(min_chars=0, filters=only(min_words_per_line=3)), Outcome())
    assert kept == "It was a very good product for me. Would buy it again\n\nThe second paragraph is another thought."


def shares(words: list[str], n: int) -> tuple[float, float]:
    """Share of characters in the most frequent n-gram, and in those that came before: by loops."""
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    total, counts = sum(map(len, words)), Counter(grams)
    most = max(counts.values(), default=0)
    top = max((most * sum(map(len, gram)) for gram, count in counts.items() if count == most), default=0) if most > 1 else 0
    covered, seen = set(), set()
    for i, gram in enumerate(grams):
        if gram in seen:
            covered.update(range(i, i + n))
        seen.add(gram)
    return min(top / total, 1.0), sum(len(words[i]) for i in covered) / total


@given(st.lists(st.sampled_from(["a", "bb", "ccc", "a.", "dd"]), min_size=2, max_size=60), st.integers(2, 10), st.floats(0, 0.99))
def test_repetitions_are_those_that_loops_count(words: list[str], n: int, limit: float) -> None:
    share = shares(words, n)[0 if n <= 4 else 1]
    limits = [1.0] * 9
    limits[n - 2] = limit
    found = rejected(" ".join(words), max_top_ngrams=tuple(limits[:3]), max_repeated_ngrams=tuple(limits[3:]))
    chars = sum(map(len, words))
    assert (found != "") == (round(share * chars) > limit * chars)


ON = dataclasses.replace(WebFilters(), max_chars=500, min_letters=0.1, max_symbols=0.9)


@given(st.text() | st.text(alphabet="aZ1 .…!\n#-•|<>&;()[]*é\u0301देа。\ud800"))
@pytest.mark.parametrize("tokenizer", ["wordpiece", "bytes"])
def test_no_text_breaks_the_filters(tokenizer: Any, text: str) -> None:
    outcome = Outcome()
    data = Data(tokenizer=tokenizer, min_chars=0, filters=ON, mask_personal=["email", "phone", "ip"])
    kept = kept_text(text, "x", data, outcome)
    whole = sum(count for reason, count in outcome.drops.counts.items() if not reason.endswith("(lines)"))
    assert whole == (0 if kept else 1)


def test_samples_are_the_first_of_the_source_however_it_is_divided() -> None:
    rng = random.Random(0)
    dropped = [(rng.choice("ab"), f"doc {i}", f"{i} " * 100) for i in range(90)]
    whole, merged = Drops(), Drops()
    for each in dropped:
        whole.add(*each)
    for start in range(0, 90, 7):
        part = Drops()
        for each in dropped[start : start + 7]:
            part.add(*each)
        merged.merge(Drops.from_json(part.as_json()))
    assert merged == whole and merged.as_json() == whole.as_json()
    assert all(len(samples) == SAMPLES and len(samples[0][1]) == SAMPLE_CHARS for samples in whole.samples.values())


def test_what_was_dropped_and_masked_is_said_on_a_line_each() -> None:
    outcome = Outcome()
    assert list(outcome_lines(outcome, 100)) == []
    outcome.drops.counts.update({"languages": 3, "filters.min_words": 1200})
    outcome.masked.update({"email": 2, "ip": 0})
    assert counted(outcome.drops.counts) == "1,200 by data.filters.min_words, 3 by data.languages"
    assert list(outcome_lines(outcome, 100)) == [f"dropped: {counted(outcome.drops.counts)} (drops.json has samples)", "masked: 2 [email]"]
