"""Pseudo-log-likelihood of sentences (Salazar et al. 2020, arXiv 1910.14659), and the minimal pairs that it decides.

PLL(W) = sum over t of ln p(w_t | W without t): each token is masked in turn. Shapes: S sentences of L tokens, B masked copies, N = B L.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from overnight.console import Line
from overnight.display import duration, plural, share
from overnight.errors import DataError
from overnight.evaluation.blimp import Pair, Paradigm, ParadigmScore, chosen_pairs, digest_of_pairs, mean
from overnight.evaluation.masked_lm import MaskedLM, flat_batch
from overnight.run_dir.atomic import write_json
from overnight.state_files import STRICT, digest_of, read_json, sealed

# Two likelihoods are a tie where they differ by less than rounding can make. A unigram model gives sentences of the same words the same terms, but adds and
# multiplies in another order: each is off by some units in the last place of fp32 (6e-8) of logits about as large as it is. The sum, in float64, adds none.
# Twenty such units are 1e-4 nats of a sentence of 80: a model that knows something prefers one of two sentences by some nats.
TIE = 1.2e-6


def pseudo_log_likelihoods(model: MaskedLM, sentences: Sequence[np.ndarray]) -> np.ndarray:
    """Return the PLL of each sentence (nats, float64).

    Args:
        model: any.
        sentences: token ids without special ones; none empty, or longer than the model's positions less two.
    """
    result = np.zeros(len(sentences))
    lengths = np.array([len(ids) for ids in sentences], np.int64)
    vocabulary = model.vocabulary
    for length in np.unique(lengths)[::-1].tolist():
        rows = np.flatnonzero(lengths == length)
        ids_SL = np.array([[vocabulary.cls, *sentences[int(row)], vocabulary.sep] for row in rows], np.int64)
        width = length + 2
        at_once = max(1, model.batch_tokens // width)
        for start in range(0, len(rows) * length, at_once):
            copies = np.arange(start, min(start + at_once, len(rows) * length))
            sentence_B, place_B = copies // length, copies % length + 1
            masked_BL = ids_SL[sentence_B]
            predicted_B = np.arange(len(copies)) * width + place_B
            labels_B = masked_BL.reshape(-1)[predicted_B].copy()
            masked_BL.reshape(-1)[predicted_B] = vocabulary.mask
            log_p, _ = model.log_probabilities(flat_batch(masked_BL.reshape(-1), np.full(len(copies), width), predicted_B, labels_B))
            np.add.at(result, rows[sentence_B], log_p.astype(np.float64))
    return result


def score_paradigm(model: MaskedLM, paradigm: Paradigm, count: int) -> ParadigmScore:
    """Return how often the good sentence of a paradigm's pairs is the likelier.

    Args:
        model: any.
        paradigm: its pairs.
        count: of pairs, drawn by their hash; 0 takes all.

    Raises:
        DataError: naming the file and the line of a sentence that has no token, or more than the model has positions for.
    """
    pairs = chosen_pairs(paradigm, count)
    tokens = [(_tokens(model, pair.good, pair), _tokens(model, pair.bad, pair)) for pair in pairs]
    # Sentences that repeat are scored once.
    numbers = {ids: at for at, ids in enumerate(dict.fromkeys(ids for pair in tokens for ids in pair))}
    likelihoods = pseudo_log_likelihoods(model, [np.array(ids) for ids in numbers])
    good, bad = (likelihoods[[numbers[pair[side]] for pair in tokens]] for side in (0, 1))
    ties = np.abs(good - bad) <= TIE * np.maximum(np.abs(good), np.abs(bad))
    return ParadigmScore(
        name=paradigm.name,
        field=paradigm.field,
        term=paradigm.term,
        pairs=len(pairs),
        wins=int(((good > bad) & ~ties).sum()),
        ties=int(ties.sum()),
        indistinguishable=sum(a == b for a, b in tokens),
    )


def _tokens(model: MaskedLM, sentence: str, pair: Pair) -> tuple[int, ...]:
    ids = tuple(model.tokenizer.encode(sentence, add_special_tokens=False).ids)
    if not ids:
        raise DataError(f"{pair.where}: the tokenizer of {model.name} makes no token of {sentence!r}; correct the line, or leave it out")
    if len(ids) + 2 > model.longest:
        raise DataError(
            f"{pair.where}: {sentence[:60]!r}... has {len(ids)} tokens, {model.name} takes {model.longest - 2} with its two special ones; "
            "leave the line out, or evaluate a model with more positions"
        )
    return ids


def score_blimp(model: MaskedLM, paradigms: Sequence[Paradigm], count: int, folder: Path, line: Line) -> list[ParadigmScore]:
    """Score paradigms one after another; each is written down when it is done, and is not done again by a second call.

    Args:
        model: any.
        paradigms: the pairs.
        count: of pairs of each, drawn by their hash; 0 takes all.
        folder: where the scores are written, in a file of this model, these pairs and this precision.
        line: where progress is shown.

    Raises:
        DataError: as of :func:`score_paradigm`.
    """
    of = digest_of([model.digest, digest_of_pairs(paradigms), count, model.precision, model.device.type])
    path = folder / f"blimp-{of}.json"
    scores = _read_scores(path, line)
    writes, began, before = True, time.monotonic(), sum(s.pairs for s in scores.values())
    every = [min(count or len(p.pairs), len(p.pairs)) for p in paradigms]
    if scores and len(scores) < len(paradigms):
        line.print(f"BLiMP: {plural(len(scores), 'paradigm')} of {len(paradigms)} are in {path} already")
    for number, paradigm in enumerate(paradigms):
        if paradigm.name in scores:
            continue
        scores[paradigm.name] = score_paradigm(model, paradigm, count)
        if writes:
            try:
                write_json(path, sealed({"version": 1, "scores": [asdict(score) for score in scores.values()]}))
            except OSError as error:  # of a folder that may only be read
                writes = False
                line.print(f"BLiMP: {path} cannot be written ({error.strerror}), so an interrupted evaluation begins anew")
        done = sum(score.pairs for score in scores.values())
        left = (time.monotonic() - began) * (sum(every) - done) / (done - before)
        line.update(
            f"BLiMP {number + 1}/{len(paradigms)} {paradigm.name}: {share(mean([*scores.values()]).accuracy)} so far, {duration(left)} left"
        )
    # Of pairs that were scored before their files were given another field or term.
    return [replace(scores[paradigm.name], field=paradigm.field, term=paradigm.term) for paradigm in paradigms]


@dataclass(frozen=True)
class _Kept:
    """The file of what is scored already."""

    __pydantic_config__ = STRICT
    version: Literal[1]
    scores: list[ParadigmScore]


def _read_scores(path: Path, line: Line) -> dict[str, ParadigmScore]:
    if not path.is_file():
        return {}
    try:
        kept: _Kept = read_json(path, _Kept, "it is made anew")
    except DataError as error:
        line.print(f"BLiMP: {error}")
        return {}
    return {score.name: score for score in kept.scores}
