"""Results of evaluations as files: `evaluation.json` of a run folder, which the report shows, and what `--json` writes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from overnight.console import Line
from overnight.errors import DataError
from overnight.evaluation.blimp import Mean, ParadigmScore, grouped, mean
from overnight.run_dir.atomic import write_json
from overnight.state_files import read_mapping, sealed

_OF_TEXT = (
    "bits_per_character",
    "word_bits_per_character",
    "word_standard_error",
    "split_bits_per_character",
    "masked_accuracy",
    "mlm_loss",
    "characters",
)


def blimp_results(scores: list[ParadigmScore], pairs: int) -> dict[str, Any]:
    """Return what scores of paradigms add up to.

    Returns:
        `accuracy` (0 to 1) and `standard_error`, `pairs` of each paradigm (0: all), `total`, `ties` and `indistinguishable` pairs, and by name the
        accuracy of `paradigms`, and accuracy and standard error of `terms` and `fields`.
    """
    counts = {"total": "pairs", "ties": "ties", "indistinguishable": "indistinguishable"}
    return {
        **_plain(mean(scores)),
        "pairs": pairs,
        **{name: sum(getattr(score, of) for score in scores) for name, of in counts.items()},
        **{f"{by}s": {name: _plain(group) for name, group in grouped(scores, by).items()} for by in ("field", "term")},
        "paradigms": {score.name: score.accuracy for score in scores},
    }


def _plain(group: Mean) -> dict[str, float | None]:
    # JSON has no NaN.
    return {"accuracy": group.accuracy, "standard_error": None if math.isnan(group.standard_error) else group.standard_error}


def flat_results(found: dict[str, Any]) -> dict[str, Any]:
    """Return what `--json` writes: the measures of the first text and BLiMP side by side, then everything."""
    text = next(iter(found["texts"].items()), None)
    flat: dict[str, Any] = {"checkpoint": found["checkpoint"], "model": found["model"]}
    if text:
        flat |= {"text": text[0]} | {key: text[1][key] for key in _OF_TEXT if key in text[1]}
    if blimp := found.get("blimp"):
        flat |= {"blimp": blimp["accuracy"], "blimp_standard_error": blimp["standard_error"], "blimp_pairs": blimp["pairs"]}
    return {**flat, "details": found}


def kept_results(run_dir: Path) -> dict[str, Any]:
    """Return what `evaluation.json` of a run folder holds, nothing where there is none, or a damaged one: it can be measured again."""
    try:
        return read_mapping(run_dir / "evaluation.json", "it is measured again")
    except DataError:
        return {}


def keep_results(run_dir: Path, found: dict[str, Any], line: Line) -> None:
    """Write results into `evaluation.json` of a run folder, beside those of the same weights; where that cannot be, say so."""
    before = kept_results(run_dir)
    if before.get("model") == found["model"]:
        found = {**before, **found, "texts": {**before.get("texts", {}), **found["texts"]}}
    try:
        write_json(run_dir / "evaluation.json", sealed({"version": 1, **found}))
    except OSError as error:
        line.print(f"{run_dir / 'evaluation.json'}: cannot be written ({error.strerror}), so the report will not show this")
