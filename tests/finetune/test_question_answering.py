"""Windows with stride and the answer search, against plain restatements of run_squad.py."""

from __future__ import annotations

import dataclasses
import itertools
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from overnight.corpus.tokenizer import SPECIALS, build_tokenizer
from overnight.corpus.tokenizer import vocabulary as vocabulary_of
from overnight.errors import ConfigError, DataError, UserError
from overnight.finetune.metrics import squad_scores
from overnight.finetune.question_answering import (
    MAX_QUESTION,
    Window,
    _max_context,
    _spans,
    against_null,
    best_answers,
    too_long,
    windows,
    with_answers,
)
from overnight.tasks.squad import Answer, Question, load_squad

CONTEXT = "The cat sat on the mat. Déjà vu: 1990s, caf\u0065\u0301 and the Bronco."


def _question(answer: str, context: str = CONTEXT, question: str = "who?") -> Question:
    return Question("q", "t", question, context, (Answer(answer, context.index(answer)),))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 30))
def test_windows_cover_every_token_and_max_context_is_the_originals(tokens: int, room: int, stride: int) -> None:
    spans = _spans(tokens, room, stride)
    assert {t for begin, count in spans for t in range(begin, begin + count)} == set(range(tokens))
    assert all(1 <= count <= room for _, count in spans)
    assert all(b - a == min(stride, count) for (a, count), (b, _) in itertools.pairwise(spans))
    flags = _max_context(tokens, spans)
    for position in range(tokens):  # _check_is_max_context
        best_score, best_index = None, None
        for index, (begin, count) in enumerate(spans):
            end = begin + count - 1
            if begin <= position <= end:
                value = min(position - begin, end - position) + 0.01 * count
                if best_score is None or value > best_score:
                    best_score, best_index = value, index
        owners = [i for i, (begin, count) in enumerate(spans) if begin <= position < begin + count and flags[i][position - begin]]
        assert owners == [best_index]


@given(st.integers(0, len(CONTEXT) - 1), st.integers(1, 30), st.integers(12, 80), st.integers(1, 40))
def test_the_span_of_a_window_is_the_answer_snapped_to_whole_tokens(
    tokenizer: Tokenizer, vocabulary: Any, begin: int, size: int, length: int, stride: int
) -> None:
    text = CONTEXT[begin : begin + size]
    cut = windows(tokenizer, vocabulary, [Question("q", "t", "who?", CONTEXT, (Answer(text, begin),))], length, stride)
    for window in cut:
        ids, question = window.ids.tolist(), [vocabulary.cls, *tokenizer.encode("who?", add_special_tokens=False).ids, vocabulary.sep]
        assert len(ids) <= length and ids[: window.first] == question and ids[-1] == vocabulary.sep
        assert window.segments.tolist() == [0] * window.first + [1] * (len(ids) - window.first)
        assert len(window.offsets) == len(window.max_context) == len(ids) - window.first - 1
        for (a, b), piece in zip(window.offsets, ids[window.first : -1], strict=True):
            assert tokenizer.encode(CONTEXT[a:b], add_special_tokens=False).ids[0] == piece or tokenizer.id_to_token(piece).startswith("##")
        if window.start is not None and window.end is not None:
            first, last = window.offsets[window.start - window.first], window.offsets[window.end - window.first]
            assert first[1] > begin and last[0] < begin + size
            marks, far = [np.where(np.arange(len(ids)) == place, 9.0, 0.0) for place in (window.start, window.end)], 400
            found = best_answers(
                [dataclasses.replace(window, max_context=np.ones_like(window.max_context))], *[[m] for m in marks], 1, far
            )[0]
            assert text.strip().lstrip("\u0301 ") in found["q"] and found["q"] in CONTEXT
    whole = windows(tokenizer, vocabulary, [Question("q", "t", "who?", CONTEXT, (Answer(text, begin),))], 400, 128)
    assert len(whole) == 1 and (whole[0].start is None) == (not text.strip("\u0301 "))


def test_an_answer_that_a_window_does_not_wholly_hold_is_not_in_it(tokenizer: Tokenizer, vocabulary: Any) -> None:
    cut = windows(tokenizer, vocabulary, [_question("cat sat on the mat", "the cat sat on the mat the cat the cat")], 12, 3)
    tokens = len(cut[0].offsets)
    assert tokens == 12 - 2 - 3 and len(cut) > 1
    answers = [(w.start, w.end) for w in cut]
    assert (None, None) in answers and all((a is None) == (b is None) for a, b in answers)


def test_a_question_whose_answer_no_window_holds_is_counted_and_not_trained_on(tokenizer: Tokenizer, vocabulary: Any) -> None:
    long = " ".join(["the cat sat"] * 5)
    asked = [
        dataclasses.replace(_question("cat"), id="held"),
        Question("longer", "t", "who?", long, (Answer(long, 0),)),
        Question("unseen", "t", "who?", "The \u200b cat.", (Answer("\u200b", 4),)),
        Question("none", "t", "who?", CONTEXT, (), impossible=True),
    ]
    found = windows(tokenizer, vocabulary, asked, 16, 4)
    left, notes = with_answers(found, asked)
    assert {window.id for window in found} - {window.id for window in left} == {"longer", "unseen"}
    assert left == [window for window in found if window.id in ("held", "none")]
    assert notes == ("2 of 4 questions are not trained on, since no window of seq_len tokens holds their answer: longer, unseen",)
    assert with_answers(left, [asked[0], asked[3]]) == (left, ())
    with pytest.raises(DataError, match=r"2 of 2 questions are not trained on, .* there is nothing to train on: raise seq_len"):
        with_answers(windows(tokenizer, vocabulary, asked[1:3], 16, 4), asked[1:3])


def test_long_questions_are_cut_to_64_tokens_and_too_short_a_length_is_refused(tokenizer: Tokenizer, vocabulary: Any) -> None:
    question = _question("cat", question="cat " * 100)
    cut = windows(tokenizer, vocabulary, [question], 128, 64)
    assert cut[0].first == MAX_QUESTION + 2
    with pytest.raises(ConfigError, match="seq_len = 64: leaves no room for the paragraph next to question q of 64 tokens"):
        windows(tokenizer, vocabulary, [question], 64, 64)


def test_a_question_is_too_long_where_not_one_token_of_its_paragraph_fits_beside_it(tokenizer: Tokenizer, vocabulary: Any) -> None:
    # [CLS], two [SEP] and a token of the paragraph leave room for 8 of 12.
    asked = [dataclasses.replace(_question("cat", question="cat " * count), id=str(count)) for count in (7, 8, 9, 100)]
    assert too_long(tokenizer, asked, 12) == {"9": 9, "100": 100}
    assert {window.id for window in windows(tokenizer, vocabulary, asked[:2], 12, 4)} == {"7", "8"}
    with pytest.raises(ConfigError, match="question 9 of 9 tokens"):
        windows(tokenizer, vocabulary, asked[2:3], 12, 4)
    assert too_long(tokenizer, asked, 68) == {}, "longer ones are cut to 64 tokens"


def test_the_first_answer_with_a_place_is_trained_on(tokenizer: Tokenizer, vocabulary: Any) -> None:
    question = Question("q", "t", "who?", CONTEXT, (Answer("elsewhere", -1), Answer("mat", CONTEXT.index("mat")), Answer("cat", 4)))
    (window,) = windows(tokenizer, vocabulary, [question], 128, 64)
    assert window.start is not None
    a, b = window.offsets[window.start - window.first]
    assert CONTEXT[a:b] == "mat"


def _window(count: int, question: str = "q", first: int = 3, max_context: list[bool] | None = None) -> Window:
    offsets = np.array([[2 * i, 2 * i + 1] for i in range(count)], dtype=np.int32).reshape(-1, 2)
    size = first + count + 1
    flags = np.ones(count, dtype=bool) if max_context is None else np.array(max_context)
    context = " ".join(chr(0x4E00 + i) for i in range(count))
    return Window(question, context, np.zeros(size, np.int32), np.zeros(size, np.int8), first, offsets, flags, None, None)


@settings(max_examples=60)
@given(st.data())
def test_the_search_finds_the_best_spans_of_all(data: st.DataObject) -> None:
    count, limit, n_best = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 14)), data.draw(st.integers(1, 25))
    flags = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    window = _window(count, max_context=flags)
    logits = st.lists(st.integers(-20, 20), min_size=len(window.ids), max_size=len(window.ids) + 3)
    start, end = np.array(data.draw(logits), dtype=np.float32), np.array(data.draw(logits), dtype=np.float32)
    predictions, nbest = best_answers([window], [start], [end], n_best, limit)
    every = {(i, j): float(start[3 + i] + end[3 + j]) for i in range(count) if flags[i] for j in range(i, min(count, i + limit))}
    if not every:
        assert predictions == {"q": ""} and nbest["q"][0]["text"] == ""
        return
    found = nbest["q"]
    assert [float(e["start_logit"]) + float(e["end_logit"]) for e in found] == sorted(every.values(), reverse=True)[:n_best]
    texts = {window.context[2 * i : 2 * j + 1]: value for (i, j), value in every.items()}
    assert all(texts[str(e["text"])] == float(e["start_logit"]) + float(e["end_logit"]) for e in found)
    assert all(window.context[int(e["start"]) :].startswith(str(e["text"])) for e in found)
    assert predictions["q"] == found[0]["text"] and len({e["text"] for e in found}) == len(found)
    assert sum(float(e["probability"]) for e in found) == pytest.approx(1.0)


def test_windows_of_a_question_compete_and_equal_texts_are_listed_once() -> None:
    first, second = _window(4), _window(4)
    low, high = np.zeros(8), np.zeros(8)
    low[4] = high[4] = 1.0
    high[5] = 3.0
    predictions, nbest = best_answers([first, second, _window(2, "other")], [low, high, np.zeros(6)], [low, high, np.zeros(6)], 5, 30)
    assert set(predictions) == {"q", "other"}
    assert predictions["q"] == first.context[4:5] and nbest["q"][0]["start_logit"] == 3.0
    assert len({e["text"] for e in nbest["q"]}) == len(nbest["q"]) == 5
    probabilities = [float(e["probability"]) for e in nbest["q"]]
    assert probabilities == sorted(probabilities, reverse=True)


@settings(max_examples=40)
@given(st.data())
def test_null_odds_are_the_lowest_score_of_no_answer_less_the_best_text(data: st.DataObject) -> None:
    parts = [_window(data.draw(st.integers(1, 5))) for _ in range(data.draw(st.integers(1, 3)))]
    starts, ends = (
        [np.array(data.draw(st.lists(st.integers(-9, 9), min_size=len(w.ids), max_size=len(w.ids)))) for w in parts] for _ in "ab"
    )
    predictions, nbest = best_answers(parts, starts, ends, 100, 30)
    odds, listed = against_null(parts, starts, ends, nbest)
    null = min(s[0] + e[0] for s, e in zip(starts, ends, strict=True))
    spans = [(i, j) for i in range(5) for j in range(i, 5)]
    best = max(s[3 + i] + e[3 + j] for w, s, e in zip(parts, starts, ends, strict=True) for i, j in spans if j < len(w.offsets))
    assert odds == {"q": null - best} and listed["q"][0]["text"] == (predictions["q"] if null <= best else "")
    assert [e["text"] for e in listed["q"]].count("") == 1 and len(listed["q"]) == len(nbest["q"]) + 1
    shares = [float(entry["probability"]) for entry in listed["q"]]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1.0)
    empty = {"": [_window(0, "")]}
    assert against_null(empty[""], [np.ones(4)], [np.ones(4)], best_answers(empty[""], [np.ones(4)], [np.ones(4)])[1])[0] == {"": 2.0}


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_a_context_of_one_character_and_of_a_million_is_read_and_its_answer_found(size: int, tokenizer: Tokenizer, vocabulary: Any) -> None:
    context = ("the cat sat. " * (size // 13 + 1))[: size - 1] + "x"
    cut = windows(tokenizer, vocabulary, [Question("q", "t", "who?", context, (Answer("x", size - 1),))], 384, 128)
    assert max(len(w.ids) for w in cut) <= 384 and (size == 1) == (len(cut) == 1)
    assert [w.start is not None for w in cut] == [False] * (len(cut) - 1) + [True] and cut[-1].offsets[-1].tolist() == [size - 1, size]
    marks = [np.where(np.arange(len(w.ids)) == w.start, 9.0, 0.0) if w.start else np.zeros(len(w.ids)) for w in cut]
    assert best_answers(cut, marks, marks)[0] == {"q": "x"}


@pytest.mark.parametrize("answer", ["हिंदू", "में", "สมศรี", "❤\ufe0f", "cafe\u0301"])
def test_an_answer_keeps_the_signs_that_the_tokenizer_drops_behind_its_last_letter(
    answer: str, tokenizer: Tokenizer, vocabulary: Any
) -> None:
    (window,) = windows(tokenizer, vocabulary, [_question(answer, f"the {answer} sat")], 64, 16)
    marks = [np.where(np.arange(len(window.ids)) == place, 9.0, 0.0) for place in (window.start, window.end)]
    assert best_answers([window], *[[mark] for mark in marks])[0] == {"q": answer}


@pytest.mark.parametrize("answer", ["Việ", "한국", "café"])
def test_an_answer_whose_letters_and_marks_stand_apart_is_found_whole(answer: str) -> None:
    apart = unicodedata.normalize("NFD", answer)
    pieces = [*SPECIALS, "the", "sat", *dict.fromkeys(answer), *(f"##{char}" for char in dict.fromkeys(answer))]
    tokenizer = build_tokenizer(pieces, False, compose=True)
    (window,) = windows(tokenizer, vocabulary_of(pieces, False), [_question(apart, f"the {apart} sat")], 64, 16)
    assert 1 not in window.ids[window.first + 1 : window.first + 1 + len(answer)]  # [UNK]
    marks = [np.where(np.arange(len(window.ids)) == place, 9.0, 0.0) for place in (window.start, window.end)]
    assert best_answers([window], *[[mark] for mark in marks])[0] == {"q": apart}


def test_scores_that_are_not_finite_are_refused_by_question() -> None:
    bad = np.zeros(8)
    bad[5] = np.nan
    with pytest.raises(UserError, match="question q: the scores of its tokens are not finite"):
        best_answers([_window(4)], [bad], [np.zeros(8)])


def test_marked_real_answers_are_found_again(data: Path, tokenizer: Tokenizer, vocabulary: Any) -> None:
    questions = load_squad(data / "squad").dev[:60]
    cut = windows(tokenizer, vocabulary, questions, 384, 128)
    assert len(cut) > len(questions)
    starts, ends = [np.zeros(len(w.ids)) for w in cut], [np.zeros(len(w.ids)) for w in cut]
    for w, start, end in zip(cut, starts, ends, strict=True):
        if w.start is not None and w.end is not None:
            start[w.start] = end[w.end] = 9.0
    predictions, nbest = best_answers(cut, starts, ends, max_answer=200)
    assert set(nbest) == {q.id for q in questions}
    scores = squad_scores({q.id: [a.text for a in q.answers] for q in questions}, predictions)
    assert scores["exact_match"] > 98.0
