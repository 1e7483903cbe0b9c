"""What `overnight evaluate` and the end of `overnight run` measure of masked language models, ours and those of others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from overnight.checkpoint.run_corpus import with_data
from overnight.config import BertRun, environment_path
from overnight.console import Line
from overnight.evaluation.blimp import read_blimp
from overnight.evaluation.masked import SEQ_LEN, masked_score
from overnight.evaluation.masked_lm import MaskedLM, RunMaskedLM
from overnight.evaluation.pseudo_likelihood import score_blimp
from overnight.evaluation.results import blimp_results, keep_results, kept_results
from overnight.evaluation.texts import NothingToPredictError, Text, text_of_shards
from overnight.evaluation.whole_words import word_score
from overnight.report.evaluation_text import results_lines

PAIRS = 100
"""Of each paradigm, by default."""


@dataclass(frozen=True)
class Requested:
    """What to measure."""

    texts: tuple[Text, ...] = ()
    blimp: Path | None = None
    pairs: int = PAIRS
    """Of each paradigm; 0 is all."""
    seq_len: int = SEQ_LEN
    """Longest sequence of the texts (tokens)."""


def evaluate_model(model: MaskedLM, requested: Requested, folder: Path, line: Line) -> dict[str, Any]:
    """Measure a model.

    Args:
        model: any.
        requested: what to measure.
        folder: where what is done of BLiMP is written, so that it is not done again.
        line: where progress is shown.

    Returns:
        `model` (the digest of its weights), `checkpoint` (its name), `texts`: by name the fields of
        :class:`overnight.evaluation.masked.MaskedScore` and, where it has words to hide, of
        :class:`overnight.evaluation.whole_words.WordScore`; and where it was wanted `blimp` (see
        :func:`overnight.evaluation.results.blimp_results`); each with its `precision`.

    Raises:
        DataError: of what cannot be read or scored.
    """
    paradigms = read_blimp(requested.blimp) if requested.blimp else []
    found: dict[str, Any] = {"model": model.digest, "checkpoint": model.name, "texts": {}}
    for text in requested.texts:
        name = text.name if requested.seq_len == SEQ_LEN else f"{text.name}, sequences of {requested.seq_len}"
        found["texts"][name] = {**asdict(masked_score(model, text, line, requested.seq_len)), "precision": model.precision}
        if words := word_score(model, text, line, requested.seq_len):
            found["texts"][name] |= asdict(words)
        line.clear()
    if paradigms:
        scores = score_blimp(model, paradigms, requested.pairs, folder, line)
        found["blimp"] = {**blimp_results(scores, requested.pairs), "precision": model.precision}
        line.clear()
    return found


def evaluate_run(run: BertRun, line: Line) -> None:
    """Measure the newest checkpoint of a run as its recipe says, at the end of `overnight run`; what was measured of it before is not done again.

    A valid text of which nothing can be predicted is said, and no error: the training is over, and what comes after it does not need the measure.

    Raises:
        DataError: of what cannot be read or scored.
    """
    model, kept = RunMaskedLM(run), kept_results(run.run_dir)
    kept = kept if kept.get("model") == model.digest else {}
    blimp = environment_path(run.evaluation.blimp, "evaluation.blimp") if run.evaluation.blimp else None
    requested, folder = Requested((), blimp, run.evaluation.blimp_pairs), run.run_dir / "evaluation"
    measured = kept.get("texts", {}).get("valid", {}).get("precision") == run.precision
    try:
        texts = () if measured else (text_of_shards(with_data(run).data_dir, "valid"),)
        found = evaluate_model(model, replace(requested, texts=texts), folder, line)
    except NothingToPredictError as error:
        line.print(f"{error.reason}, so there are no bits per character")
        found = evaluate_model(model, requested, folder, line)
    for text in results_lines(found, groups=False):
        line.print(text)
    if found["texts"] or "blimp" in found:
        keep_results(run.run_dir, found, line)
