"""Extractive question answering: windows over a long paragraph, and the answer from the scores of its tokens.

Shapes: W windows, T tokens of a window with [CLS] and [SEP], C tokens of the context in a window.
A window is [CLS] question [SEP] context part [SEP], as in run_squad.py of google-research/bert.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from overnight.errors import ConfigError, DataError, UserError
from overnight.finetune.encode import join, read_as_text
from overnight.tasks.squad import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from overnight.corpus.tokenizer import Vocabulary

MAX_QUESTION = 64
"""Longest question (tokens), as in run_squad.py; the rest is cut."""
# Texts tokenized at once: offsets of a whole data set would take gigabytes as Python objects.
_BATCH = 512


@dataclass(frozen=True)
class Window:
    """A question beside a part of its context."""

    id: str
    """Of the question."""
    context: str
    """The whole paragraph, which the offsets count in."""
    ids: npt.NDArray[np.int32]
    """(T,)"""
    segments: npt.NDArray[np.int8]
    """(T,) 0 for the question, 1 for the context."""
    first: int
    """Position of the first context token in the window."""
    offsets: npt.NDArray[np.int32]
    """(C, 2) characters of the context, from and to, of each context token."""
    max_context: npt.NDArray[np.bool_]
    """(C,) whether this is the window in which the token has the most context on its shorter side."""
    start: int | None
    """Position in the window of the answer's first token; None where the answer is not, or not wholly, in this window."""
    end: int | None
    """Position of its last token (inclusive)."""


def longest_question(length: int) -> int:
    """Return the most tokens of a question beside which a window of a length (T) has room for a token of the context; longer ones are cut, or refused."""
    return min(MAX_QUESTION, length - 4)


def too_long(tokenizer: Tokenizer, questions: Sequence[Question], length: int) -> dict[str, int]:
    """Return the tokens of each question beside which a window of a length (T) has no room for the context, by its id."""
    most = longest_question(length)
    if most == MAX_QUESTION:
        return {}
    counts = {q.id: len(ids) for q, (ids, _) in zip(questions, _tokenize(tokenizer, [q.question for q in questions]), strict=True)}
    return {question: count for question, count in counts.items() if count > most}


def windows(tokenizer: Tokenizer, vocabulary: Vocabulary, questions: Sequence[Question], length: int, stride: int) -> list[Window]:
    """Split the contexts into windows, each with its question.

    The answer of a window is the first of the question's answers that has a place, snapped outwards to whole tokens.

    Args:
        tokenizer: a tokenizer without truncation or padding that gives offsets into the original text.
        vocabulary: gives the ids of [CLS] and [SEP].
        questions: in any order; one or more windows each, in order.
        length: most tokens of a window (T).
        stride: context tokens by which successive windows of a context advance.

    Raises:
        ConfigError: a length that leaves no room for the context beside a question.
    """
    assert stride > 0, stride
    asked = _tokenize(tokenizer, [q.question for q in questions])
    unique = {context: i for i, context in enumerate(dict.fromkeys(q.context for q in questions))}
    contexts = _tokenize(tokenizer, list(unique))
    result: list[Window] = []
    for question, (question_ids, _) in zip(questions, asked, strict=True):
        ids, offsets = contexts[unique[question.context]]
        query = question_ids[:MAX_QUESTION].tolist()
        max_tokens = length - len(query) - 3
        if len(query) > longest_question(length):
            raise ConfigError(
                f"seq_len = {length}: leaves no room for the paragraph next to question {question.id} of {len(query)} tokens; use 128 or more"
            )
        answer = _answer_tokens(question, offsets)
        spans = _spans(len(ids), max_tokens, stride)
        for (begin, count), best in zip(spans, _max_context(len(ids), spans), strict=True):
            part = slice(begin, begin + count)
            encoded = join(query, ids[part].tolist(), vocabulary.cls, vocabulary.sep, length)
            first = len(query) + 2
            inside = answer is not None and begin <= answer[0] and answer[1] < begin + count
            start, end = (first + answer[0] - begin, first + answer[1] - begin) if answer is not None and inside else (None, None)
            result.append(Window(question.id, question.context, encoded.ids, encoded.segments, first, offsets[part], best, start, end))
    return result


def with_answers(found: list[Window], questions: Sequence[Question]) -> tuple[list[Window], tuple[str, ...]]:
    """Leave out the windows of questions whose answer no window holds: they would teach that there is none.

    Either the answer is longer than a window leaves room for, or it has no token (zero-width characters).

    Args:
        found: of :func:`windows`.
        questions: that they are of.

    Returns:
        the others, and a note that counts and names the questions.

    Raises:
        DataError: no question is left.
    """
    answered = {window.id for window in found if window.start is not None} | {q.id for q in questions if q.impossible}
    lost = [q.id for q in questions if q.id not in answered]
    if not lost:
        return found, ()
    names = ", ".join(lost[:5]) + (f" and {len(lost) - 5:,} more" if len(lost) > 5 else "")
    what = (
        f"{len(lost):,} of {len(questions):,} questions are not trained on, since no window of seq_len tokens holds their answer: {names}"
    )
    if len(lost) == len(questions):
        raise DataError(f"{what}; there is nothing to train on: raise seq_len")
    return [window for window in found if window.id in answered], (what,)


def _tokenize(tokenizer: Tokenizer, texts: list[str]) -> list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
    """Return the ids (n,) and the character offsets (n, 2) of every text."""
    read_as_text(tokenizer)
    result = []
    for begin in range(0, len(texts), _BATCH):
        for encoding in tokenizer.encode_batch(texts[begin : begin + _BATCH], add_special_tokens=False):
            result.append((np.array(encoding.ids, dtype=np.int32), np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)))
    return result


def _answer_tokens(question: Question, offsets: npt.NDArray[np.int32]) -> tuple[int, int] | None:
    """Return the first and last context token that touch the answer, None for no answer or one without a token."""
    for answer in question.answers:
        if answer.start < 0:
            continue
        touching = np.flatnonzero((offsets[:, 1] > answer.start) & (offsets[:, 0] < answer.start + len(answer.text)))
        return (int(touching[0]), int(touching[-1])) if len(touching) else None
    return None


def _spans(tokens: int, max_tokens: int, stride: int) -> list[tuple[int, int]]:
    """Return (first token, tokens) of each window over a context, as run_squad.py makes them; one empty window for an empty context."""
    spans = []
    begin = 0
    while True:
        count = min(tokens - begin, max_tokens)
        spans.append((begin, count))
        if begin + count == tokens:
            return spans
        begin += min(count, stride)


def _max_context(tokens: int, spans: list[tuple[int, int]]) -> list[npt.NDArray[np.bool_]]:
    """Return for each window, of which of its tokens it is the best: most context on the shorter side + 0.01 x window, the first at equality."""
    best = np.full(tokens, -1.0)
    owner = np.full(tokens, -1)
    for index, (begin, count) in enumerate(spans):
        place = np.arange(count)
        value = np.minimum(place, count - 1 - place) + 0.01 * count
        better = value > best[begin : begin + count]
        best[begin : begin + count][better] = value[better]
        owner[begin : begin + count][better] = index
    return [owner[begin : begin + count] == index for index, (begin, count) in enumerate(spans)]


_Candidate = tuple[float, float, float, str, int]
"""Score, start logit, end logit, text and its first character in the context."""


def best_answers(
    windows: Sequence[Window],
    start_logits: Sequence[npt.NDArray[np.floating[Any]]],
    end_logits: Sequence[npt.NDArray[np.floating[Any]]],
    n_best: int = 20,
    max_answer: int = 30,
) -> tuple[dict[str, str], dict[str, list[dict[str, str | float]]]]:
    """Return the answers with the highest start + end score, as exact text of the original context.

    The search is over all spans, not only over the n best starts and ends as in run_squad.py, so it always finds one; like there an
    answer starts at a token for which its window has the most context, and equal texts of a question are listed once.

    Args:
        windows: of any number of questions.
        start_logits, end_logits: one row a window, T or more scores each (padding is not read).
        n_best: answers listed for a question.
        max_answer: longest answer (tokens).

    Returns:
        What `predictions.json` holds (id -> text) and `nbest_predictions.json` (id -> text, probability, start_logit, end_logit, and of a text
        that is not empty `start`, the character of the context where it begins; best first; probabilities are among those listed).

    Raises:
        UserError: scores that are not finite.
    """
    assert len(windows) == len(start_logits) == len(end_logits) and n_best > 0 and max_answer > 0
    found: dict[str, list[_Candidate]] = {}
    for window, start, end in zip(windows, start_logits, end_logits, strict=True):
        found.setdefault(window.id, []).extend(_candidates(window, start, end, n_best, max_answer))
    predictions: dict[str, str] = {}
    nbest: dict[str, list[dict[str, str | float]]] = {}
    for question, candidates in found.items():
        candidates.sort(key=lambda c: -c[0])
        unique: dict[str, _Candidate] = {}
        for candidate in candidates:
            unique.setdefault(candidate[3], candidate)
        # A context without a token has no span; the answer is then the empty text.
        kept = list(unique.values())[:n_best] or [(0.0, 0.0, 0.0, "", 0)]
        weights = np.exp(np.array([c[0] for c in kept]) - kept[0][0])
        shares = weights / weights.sum()
        predictions[question] = kept[0][3]
        nbest[question] = [
            {"text": text, "probability": float(p), "start_logit": s, "end_logit": e} | ({"start": begin} if text else {})
            for (_, s, e, text, begin), p in zip(kept, shares, strict=True)
        ]
    return predictions, nbest


def against_null(
    windows: Sequence[Window],
    start_logits: Sequence[npt.NDArray[np.floating[Any]]],
    end_logits: Sequence[npt.NDArray[np.floating[Any]]],
    nbest: Mapping[str, list[dict[str, str | float]]],
) -> tuple[dict[str, float], dict[str, list[dict[str, str | float]]]]:
    """Compare the best answers with that of no answer, which is the span of [CLS] in the window where its score is lowest (SQuAD 2.0, run_squad.py).

    Args:
        windows, start_logits, end_logits: as of :func:`best_answers`.
        nbest: of :func:`best_answers`.

    Returns:
        What `null_odds.json` holds (id -> score of no answer minus that of the best text), and `nbest_predictions.json` with the empty
        text among the others.
    """
    nulls: dict[str, tuple[float, float, float]] = {}
    for window, start, end in zip(windows, start_logits, end_logits, strict=True):
        null = (float(start[0]) + float(end[0]), float(start[0]), float(end[0]))
        nulls[window.id] = min(nulls.get(window.id, null), null)
    odds, ranked = {}, {}
    for question, found in nbest.items():
        score, start_logit, end_logit = nulls[question]
        odds[question] = score - (float(found[0]["start_logit"]) + float(found[0]["end_logit"]))
        entries = [entry for entry in found if entry["text"]]
        entries.append({"text": "", "probability": 0.0, "start_logit": start_logit, "end_logit": end_logit})
        scores = np.array([float(entry["start_logit"]) + float(entry["end_logit"]) for entry in entries])
        weights = np.exp(scores - scores.max())
        shares = weights / weights.sum()
        order = np.argsort(-scores, kind="stable")
        ranked[question] = [{**entries[i], "probability": float(shares[i])} for i in order]
    return odds, ranked


def _candidates(
    window: Window, start_logits: npt.NDArray[np.floating[Any]], end_logits: npt.NDArray[np.floating[Any]], n_best: int, max_answer: int
) -> list[_Candidate]:
    """Return the best spans of a window, best first."""
    count = len(window.offsets)
    assert len(start_logits) >= len(window.ids) and len(end_logits) >= len(window.ids)
    part = slice(window.first, window.first + count)
    start, end = np.asarray(start_logits[part], dtype=np.float64), np.asarray(end_logits[part], dtype=np.float64)
    if not (np.isfinite(start).all() and np.isfinite(end).all()):
        raise UserError(f"question {window.id}: the scores of its tokens are not finite; training diverged, lower the learning rate")
    starts = np.flatnonzero(window.max_context)
    if not len(starts):
        return []
    reach = min(max_answer, count)
    padded = np.concatenate([end, np.full(reach, -np.inf)])
    # (starts, reach): the score of the span from each start over 1, 2, ... tokens; spans beyond the window are -inf.
    scores = (start[starts, None] + np.lib.stride_tricks.sliding_window_view(padded, reach)[starts]).ravel()
    n = min(n_best, int(np.isfinite(scores).sum()))
    top = np.argpartition(-scores, n - 1)[:n]
    top = top[np.lexsort((top, -scores[top]))]
    spans = [(int(starts[i // reach]), int(starts[i // reach] + i % reach)) for i in top]
    begins = window.offsets[:, 0].tolist()
    return [(float(start[s] + end[e]), float(start[s]), float(end[e]), _text(window, s, e), begins[s]) for s, e in spans]


def _text(window: Window, first: int, last: int) -> str:
    """Return the characters of a span of tokens, with the accents and vowel signs that follow its last letter.

    Where they are stripped, or put together with their letter, they stand outside every token; so do the later letters of a Korean syllable.
    """
    end = int(window.offsets[last, 1])
    until = int(window.offsets[last + 1, 0]) if last + 1 < len(window.offsets) else len(window.context)
    while end < until and (unicodedata.category(window.context[end]) == "Mn" or "\u1160" <= window.context[end] <= "\u11ff"):
        end += 1
    return window.context[window.offsets[first, 0] : end]
