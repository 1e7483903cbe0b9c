"""What a reader sees first: samples and corpus are shown, settings are folded away, routine notes are no alarm."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from overnight.config import LambConfig, build_run, to_tree
from overnight.report.figures import ROUTINE, event_text
from overnight.report.page import write_report
from overnight.report.summary import summarize, summary_text
from tests.report.sample import byte_metrics, byte_settings, finetunings, metrics, settings, write_run

SAMPLES: dict[str, Any] = {
    "checkpoint": "step-0000250",
    "parameters": 991746,
    "corpus": {"vocabulary": 4096, "train": {"documents": 3922, "tokens": 3734690}, "valid": {"documents": 1, "tokens": 115117}},
    "masks": [
        {
            "text": "the [MASK] of <b>x</b>.",
            "word": "root",
            "guesses": [{"token": ",", "probability": 0.5}, {"token": "root", "probability": 0.25}],
        }
    ],
}


def page_of(folder: Path, lines: list[dict[str, Any]], run: dict[str, Any] | None = None, samples: dict[str, Any] | None = None) -> str:
    write_run(folder, lines, run)
    if samples:
        (folder / "samples.json").write_text(json.dumps(samples))
    return write_report([folder], folder / "report.html").read_text(encoding="utf-8").split("<main>")[1].split("</main>")[0]


def test_size_corpus_and_filled_masks_are_on_the_page_and_in_the_text(tmp_path: Path) -> None:
    page, text = page_of(tmp_path / "run", metrics(), samples=SAMPLES), summary_text(tmp_path / "run")
    for shown in (page, text):
        assert "991,746 parameters, trained on 3,922 documents of 3,734,690 tokens, validated on 1 document of 115,117 tokens" in shown
    assert "the <mark>root</mark> of &lt;b&gt;x&lt;/b&gt;." in page and "<b>root</b> 25.0 %" in page and "&#34;,&#34; 50.0 %" in page
    assert '- the [MASK] of <b>x</b>.\n  "," 50.0 %, root 25.0 % (right: root)' in text


def test_a_sentence_without_a_mask_is_shown_before_the_word(tmp_path: Path) -> None:
    mask = {"text": "a sentence", "word": "root", "guesses": []}
    assert "<p>a sentence<mark>root</mark>" in page_of(tmp_path / "run", metrics(), samples={"masks": [mask]})


def test_a_byte_model_shows_what_it_writes(tmp_path: Path) -> None:
    texts = {"checkpoint": "x", "texts": [{"prompt": "It was", "text": " a <film>"}]}
    page = page_of(tmp_path / "run", byte_metrics(), byte_settings(), texts)
    assert "It was<mark> a &lt;film&gt;</mark>" in page and "was masked" not in page


def test_a_folder_that_was_imported_has_no_phase_that_is_to_do(tmp_path: Path) -> None:
    run = settings(phases={"elsewhere": {"steps": 1, "global_batch_size": 1}})
    lines = finetunings([0.67, 0.66, 0.68], [0.50, 0.49, 0.51])
    folder = write_run(tmp_path / "run", lines, run)
    assert "0 of 1" in summary_text(folder)
    (folder / "imported.json").write_text("{}")
    page, found = write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8").split("<main>")[1], summarize(folder)
    assert "<h2>Pretraining</h2>" not in page and "<h2>Tasks</h2>" in page and "validation after" not in summary_text(folder)
    assert found["finished"] and found["notes"] == ["pretrained elsewhere: imported.json says where it comes from"]
    both = write_report([folder, write_run(tmp_path / "own", metrics())], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h2>Pretraining</h2>" in both and "<th>elsewhere</th>" not in both


@pytest.mark.parametrize("samples", [None, {"parameters": 5, "masks": []}, {"masks": [], "texts": []}])
def test_a_run_without_samples_has_no_section_for_them(samples: dict[str, Any] | None, tmp_path: Path) -> None:
    assert "<h2>Samples</h2>" not in page_of(tmp_path / "run", metrics(), samples=samples)


def test_beside_a_run_with_samples_one_without_has_no_heading(tmp_path: Path) -> None:
    page_of(tmp_path / "first", metrics(), settings("first"), SAMPLES)
    page_of(tmp_path / "second", metrics(), settings("second"), {"masks": []})
    page = write_report([tmp_path / "first", tmp_path / "second"], tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<h3>first</h3>" in page and "<h3>second</h3>" not in page


def test_settings_are_closed_and_those_of_the_recipe_come_before_all(tmp_path: Path) -> None:
    small = {"name": "demo", "phases": {"short": {"steps": 200, "global_batch_size": 64, "optim": {"lr": 0.004, "bias_correction": True}}}}
    tree = to_tree(build_run(small))
    page = page_of(tmp_path / "run", metrics(), tree).split("<h2>Settings</h2>")[1].split("<h2>Environment</h2>")[0]
    assert "<details open" not in page and page.count("<details>") == 2
    own, every = page.split("</details>")[:2]
    assert re.findall("<dt>(.*?)</dt>", own) == ["name", "phases.short.steps", "phases.short.global_batch_size", "phases.short.optim.lr"]
    assert "4 values other than the defaults" in own and "phases.short.optim.bias_correction" in every
    assert len(re.findall("<dt>", every)) > len(dataclasses.fields(LambConfig))
    assert "True" not in page and "False" not in page and "<dd>true</dd>" in every and "<dd>[0.9, 0.999]</dd>" in every


def test_what_is_measured_of_memory_is_a_routine_note_and_no_alarm(tmp_path: Path) -> None:
    memory = {"kind": "event", "event": "memory", "phase": "short", "global_step": 200, "micro_batch_size": 32, "peak_gb": 0.855}
    odd = {"kind": "event", "event": "spike", "global_step": 100, "message": "the loss rose"}
    page = page_of(tmp_path / "run", [*metrics(), memory, odd]).split("<h2>Events</h2>")[1]
    alarms, routine = page.split("<details>")
    assert "step 100: spike: the loss rose" in alarms and "memory" not in alarms and "GB" not in alarms
    assert "1 routine note" in routine and "step 200: phase short used at most 0.85 GB, with 32 sequences at once" in routine
    assert "memory" in ROUTINE and "spike" not in ROUTINE
    assert event_text({"event": "memory"}) == "memory"


def test_a_page_says_where_the_rows_that_are_scored_chose(tmp_path: Path) -> None:
    first, *others = finetunings([0.67, 0.66, 0.68], [0.50, 0.49, 0.51])
    page = page_of(tmp_path / "run", [*metrics(), {**first, "selected_on": "dev"}, *others], settings())
    assert " · chosen by the rows that are scored here" in page


def test_a_verdict_is_green_only_where_no_baseline_is_better(tmp_path: Path) -> None:
    for name, values, kind in (("below", [0.67, 0.66, 0.68], "lose"), ("above", [0.97, 0.96, 0.98], "win")):
        page = page_of(tmp_path / name, [*metrics(), *finetunings(values, [0.50, 0.49, 0.51])], settings(name))
        assert re.findall(r'<span class="(win|lose|open)">', page) == [kind]
        assert "word overlap 88.0 %</small>" in page
