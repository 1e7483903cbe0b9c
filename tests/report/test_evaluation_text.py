"""The page and the summary show bits per character, BLiMP and the end of the plateau as the files have them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from overnight.errors import DataError
from overnight.report.evaluation_text import blimp_line, masked_line
from overnight.report.page import write_report
from overnight.report.plateau import plateau, plateau_text
from overnight.report.run_reader import read_folder
from overnight.report.summary import summarize, summary_text
from overnight.state_files import sealed
from tests.report.sample import metrics, settings, write_run
from tests.report.test_page import Page

SCORE = {"bits_per_character": 2.3456, "masked_accuracy": 0.307, "masked_tokens": 12345, "characters": 98765, "unknown": 0.0}
MEAN = {"accuracy": 0.612, "standard_error": 0.0058}
BLIMP = {
    **MEAN,
    "total": 6700,
    "ties": 40,
    "indistinguishable": 3,
    "fields": {"syntax": {"accuracy": 0.55, "standard_error": 0.01}},
    "terms": {"island_effects": {"accuracy": 0.481, "standard_error": None}},
    "paradigms": {f"p{i}": 0.6 for i in range(67)},
}


def lines_of(losses: list[float], unigram: float | None = 6.0) -> list[dict[str, Any]]:
    """Lines of metrics with these training losses, ten steps apart, a second each."""
    start = {"kind": "phase", "phase": "short", "global_step": 0, "event": "start", "seconds": 0.0}
    train = [
        {
            "kind": "train",
            "phase": "short",
            "step": 10 * i,
            "global_step": 10 * i,
            "seconds": 10.0 * i,
            "loss": loss + 0.7,
            "mlm_loss": loss,
        }
        for i, loss in enumerate(losses, 1)
    ]
    return [{**start, **({} if unigram is None else {"plateau_loss": unigram})}, *train]


def found(folder: Path, losses: list[float], unigram: float | None = 6.0) -> dict[str, Any] | None:
    return plateau(read_folder(write_run(folder, lines_of(losses, unigram))))


def test_the_plateau_ends_at_the_first_loss_that_stays_below_it(tmp_path: Path) -> None:
    losses = [8.0, 6.6, 6.2, *[6.0 + 0.1 * math.sin(7 * i) for i in range(40)], *[5.9 - 0.2 * i for i in range(20)]]
    at = next(i for i, loss in enumerate(losses) if loss < 0.97 * 6.0)
    assert at > 40 and found(tmp_path / "a", losses) == {"loss": 6.0, "global_step": 10 * at + 10, "seconds": 10.0 * at + 10}
    # Lines that are low by chance, and losses above the entropy that fall to the plateau, are not its end.
    losses[5] = losses[20] = losses[21] = 4.0
    again = found(tmp_path / "b", losses)
    assert again is not None and again["global_step"] == 10 * at + 10
    assert "was left at step 4" in plateau_text(again) and "masked-LM loss 6.000" in plateau_text(again)


def test_a_run_on_the_plateau_says_so_and_an_older_one_nothing(tmp_path: Path) -> None:
    flat = [6.0 + 0.05 * math.sin(i) for i in range(50)]
    stays = found(tmp_path / "a", flat)
    assert stays == {"loss": 6.0, "global_step": None, "seconds": None} and "was not left" in plateau_text(stays)
    late = found(tmp_path / "b", [*flat, 5.0, 5.0, 5.0, 5.0])  # four lines may be chance
    assert late is not None and late["global_step"] is None
    assert found(tmp_path / "c", [*flat, *[5.0] * 5])["global_step"] == 510  # type: ignore[index]
    assert found(tmp_path / "d", flat, None) is None and found(tmp_path / "e", []) == stays


def evaluated(folder: Path, name: str = "demo", **more: Any) -> Path:
    """A run folder that was evaluated."""
    lines = metrics()
    lines[0]["plateau_loss"] = 6.0
    run = write_run(folder, lines, settings(name))
    found = {"version": 1, "model": "0", "checkpoint": "step-0000250", "texts": {"valid": SCORE}, "blimp": BLIMP, **more}
    (run / "evaluation.json").write_text(json.dumps(sealed(found)))
    return run


def test_the_summary_says_what_was_measured_and_when_the_plateau_was_left(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "run")
    text, summary = summary_text(run), summarize(run)
    assert "evaluated at step-0000250" in text and "valid: bits per character 2.346  masked accuracy 30.7 % of 12,345 tokens" in text
    assert (
        "BLiMP: 61.2 % (standard error 0.6), mean of 67 paradigms, 6,700 pairs; 40 ties counted half, of which 3 are the same tokens"
        in text
    )
    assert plateau_text(summary["plateau"]) in text and summary["plateau"]["global_step"] is not None
    assert "unknown" not in masked_line("x", SCORE) and "1.0 % of its characters are unknown" in masked_line(
        "x", {**SCORE, "unknown": 0.01}
    )
    assert blimp_line({**BLIMP, "ties": 0, "indistinguishable": 0}).endswith("6,700 pairs; no ties")
    words = {**SCORE, "word_bits_per_character": 4.376, "word_standard_error": 0.0421}
    assert "bits per character 2.346, of whole words 4.38 (standard error 0.04)  masked" in masked_line("x", words)
    assert "of whole words 4.38  masked" in masked_line("x", {**words, "word_standard_error": None})
    assert "standard error" not in blimp_line({**BLIMP, "standard_error": None})


def test_the_page_has_the_tables_for_one_run_and_for_several(tmp_path: Path) -> None:
    other = {**SCORE, "bits_per_character": 3.21, "word_bits_per_character": 4.376, "word_standard_error": 0.0421}
    one = evaluated(tmp_path / "one", texts={"valid": SCORE, "<b>.txt": other})
    bare, plain = evaluated(tmp_path / "bare", "bare"), write_run(tmp_path / "plain", metrics(), settings("plain"))
    (bare / "evaluation.json").write_text(json.dumps({"checkpoint": "step-1", "texts": {}}))
    text = Page(write_report([one], tmp_path / "one.html")).text
    for part in (
        "Yardsticks",
        "2.346",
        "3.210",
        "4.38 ± 0.04",
        "<b>.txt",
        "61.2 %",
        "± 0.6",
        "syntax",
        "island effects",
        "48.1 %",
        "step-0000250",
        "was left at step",
    ):
        assert part in text, part
    both = Page(write_report([one, bare, plain], tmp_path / "both.html")).text
    assert "61.2 %" in both and "Yardsticks" in both
    assert "Yardsticks" not in Page(write_report([plain], tmp_path / "plain.html")).text


def test_the_page_says_how_much_of_a_text_is_unknown_as_the_summary_does(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "run", texts={"valid": SCORE, "x.txt": {**SCORE, "unknown": 0.125}})
    assert Page(write_report([run], tmp_path / "page.html")).text.count("12.5 % of its characters are unknown") == 1
    assert summary_text(run).count("12.5 % of its characters are unknown") == 1


@pytest.mark.parametrize(
    "content",
    [
        "{",
        json.dumps({"texts": {}}),
        json.dumps({"checkpoint": "x", "blimp": {"accuracy": "high"}}),
        '{"checkpoint": "x", "checksum_of_the_rest": "0"}',
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(content: str, tmp_path: Path) -> None:
    run = evaluated(tmp_path / "run")
    (run / "evaluation.json").write_text(content)
    with pytest.raises(DataError, match=r"evaluation.json: .*remove the file to continue without it"):
        summarize(run)
