"""The numbers a run is judged by."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from overnight.report.summary import duration, summarize, summary_text
from tests.report.sample import byte_metrics, byte_settings, finetunings, metrics, settings, write_run


def test_phase_scores_are_the_last_validation_ones_of_each_phase(tmp_path: Path) -> None:
    lines = metrics()
    found = summarize(write_run(tmp_path / "run", lines))
    for row in found["phases"]:
        last = [x for x in lines if x["kind"] == "eval" and x["phase"] == row["name"]][-1]
        assert {key: row[key] for key in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")} == {
            key: last[key] for key in ("mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy")
        }
    assert found["finished"] is False, "the three seeds are not there yet"
    assert [row["finished"] for row in found["phases"]] == [True, True]


def test_phases_share_out_the_tokens_and_the_time_of_the_run(tmp_path: Path) -> None:
    found = summarize(write_run(tmp_path / "run", metrics()))
    assert [row["tokens"] for row in found["phases"]] == [200 * 64 * 110, 50 * 32 * 220]
    assert sum(row["tokens"] for row in found["phases"]) == found["tokens"]
    assert sum(row["seconds"] for row in found["phases"]) == pytest.approx(found["seconds"])
    assert found["sequences"] == 200 * 64 + 50 * 32


def test_a_run_without_nsp_has_no_nsp_scores(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics(nsp=False))
    assert [row["nsp_accuracy"] for row in summarize(folder)["phases"]] == [None, None]
    assert "NSP" not in summary_text(folder)


def test_a_task_that_was_not_run_yet_is_a_note_and_no_table(tmp_path: Path) -> None:
    text = summary_text(write_run(tmp_path / "run", metrics()))
    assert text.count("not run yet") == text.count("note: docnames") == 2 and "median" not in text


def test_a_byte_model_is_evaluated_by_its_last_validation_bits_per_byte(tmp_path: Path) -> None:
    lines = byte_metrics()
    folder = write_run(tmp_path / "run", lines, byte_settings())
    last = [line for line in lines if line["kind"] == "eval"][-1]
    (row,) = summarize(folder)["phases"]
    assert (row["bits_per_byte"], row["byte_accuracy"]) == (last["bits_per_byte"], last["byte_accuracy"])
    head, cells = (line for line in summary_text(folder).splitlines() if line.startswith(("validation", "only")))
    assert "bits per byte" in head and "masked-LM" not in head and f"  {last['bits_per_byte']:.3f}  " in cells


def test_a_run_that_called_its_bits_per_byte_bits_per_character_is_read_the_same(tmp_path: Path) -> None:
    old = [{("bits_per_character" if key == "bits_per_byte" else key): value for key, value in line.items()} for line in byte_metrics()]
    was, now = (summarize(write_run(tmp_path / name, lines, byte_settings())) for name, lines in (("was", old), ("now", byte_metrics())))
    assert was["phases"] == now["phases"] and now["phases"][0]["bits_per_byte"] > 0


def test_a_byte_model_that_was_not_evaluated_yet_has_a_dash(tmp_path: Path) -> None:
    text = summary_text(write_run(tmp_path / "run", byte_metrics()[:3], byte_settings()))
    assert "bits per byte" in text and " - " in text


def test_an_unfinished_phase_is_named_with_the_steps_done(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics()[:-3])
    found = summarize(folder)
    assert found["phases"][1]["finished"] is False
    assert "45 of 50" in summary_text(folder)
    assert "left to train: long" in summary_text(folder)


@pytest.mark.parametrize(
    ("phase", "step", "said"),
    [
        ("short", 120, ["120 of 200", "0 of 50"]),
        ("long", 10, ["200", "10 of 50"]),
        ("long", 50, ["200", "50"]),
        ("other", 50, ["0 of 200", "0 of 50"]),
    ],
)
def test_how_far_a_run_without_lines_is_the_newest_checkpoint_says(phase: str, step: int, said: list[str], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    write_checkpoint(folder, {"progress": {"phase": phase, "step": step}})
    text = summary_text(folder)
    assert [re.split(r" {2,}", line)[1] for line in text.splitlines() if line.startswith(("short ", "long "))] == said
    assert ("left to train" in text) is any(" of " in steps for steps in said)


def test_how_long_the_phases_of_a_budget_without_lines_are_its_record_says(tmp_path: Path) -> None:
    budget = settings(budget="9 h")
    folder = write_run(tmp_path / "run", [], {**budget, "phases": {name: {} for name in budget["phases"]}})
    write_checkpoint(folder, {"progress": {"phase": "long", "step": 40}})
    decisions = [{"phase": phase, "steps": steps} for phase, steps in (("short", 90), ("short", 100), ("long", 40))]
    (folder / "budget.json").write_text(json.dumps({"decisions": decisions}))
    assert [(row["steps"], row["finished"]) for row in summarize(folder)["phases"]] == [(100, True), (40, True)]


def test_a_report_leaves_a_damaged_checkpoint_to_the_training(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics()[:-3])
    write_checkpoint(folder, {"progress": {"phase": "long"}})
    (folder / "budget.json").write_text("{")
    assert "45 of 50" in summary_text(folder)


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write the newest checkpoint of a run folder, without its tensors."""
    (folder / "checkpoints" / "step-0000250").mkdir(parents=True)
    (folder / "checkpoints" / "latest").write_text("step-0000250\n")
    (folder / "checkpoints" / "step-0000250" / "state.json").write_text(json.dumps(state))


def test_a_finished_run_has_nothing_to_note(tmp_path: Path) -> None:
    found = summarize(write_run(tmp_path / "run", metrics() + finetunings([0.67, 0.66, 0.68], [0.50, 0.49, 0.51])))
    assert found["finished"] and found["notes"] == []
    task = found["tasks"][0]
    assert (task["pretrained"]["median"], task["random"]["median"]) == (0.67, 0.50)
    assert task["pretrained"]["values"] == {0: 0.67, 1: 0.66, 2: 0.68}
    assert task["wins"] is False and task["verdict"].startswith("pretraining does not win: beaten by word overlap")
    assert task["baselines"] == [{"method": "word overlap", "value": 0.88, "others": {}}]


def test_what_was_made_from_an_older_checkpoint_is_noted(tmp_path: Path) -> None:
    seeds = [{**line, "checkpoint": "step-0000200"} for line in finetunings([0.9] * 3, [0.8] * 3)]
    folder = write_run(tmp_path / "run", [*metrics(), *seeds])
    (folder / "evaluation.json").write_text(json.dumps({"checkpoint": "step-0000200"}))
    (folder / "samples.json").write_text(json.dumps({"checkpoint": "step-0000250"}))
    assert summarize(folder)["notes"] == []
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/latest").write_text("step-0000250")
    again = "step-0000200, and the newest checkpoint is step-0000250: run its command again"
    assert summarize(folder)["notes"] == [f"evaluated at {again}", f"docnames was trained from {again}"]


def test_missing_seeds_are_named_and_the_verdict_is_provisional(tmp_path: Path) -> None:
    found = summarize(write_run(tmp_path / "run", metrics() + finetunings([0.67, 0.66, 0.68], [0.50, 0.49])))
    assert "docnames random init: seed 2 not run yet" in found["notes"]
    assert found["tasks"][0]["verdict"].endswith(", so far")
    assert not found["finished"]


def test_a_task_of_which_only_the_baseline_ran_has_its_metric(tmp_path: Path) -> None:
    text = summary_text(write_run(tmp_path / "run", metrics() + finetunings([], [])))
    assert "docnames, accuracy" in text and "88.0 %" in text


def test_a_repeated_seed_counts_once_with_its_last_value(tmp_path: Path) -> None:
    lines = finetunings([0.60, 0.66, 0.68], [0.50, 0.49, 0.51]) + finetunings([0.70], [])
    task = summarize(write_run(tmp_path / "run", metrics() + lines))["tasks"][0]
    assert task["pretrained"]["values"] == {0: 0.70, 1: 0.66, 2: 0.68}


def test_seeds_are_compared_with_the_baseline_of_their_own_settings(tmp_path: Path) -> None:
    *seeds, baseline = [{**line, "config_hash": "a"} for line in finetunings([0.67, 0.66, 0.68], [0.50, 0.49, 0.51])]
    # Killed before the first seed of other settings was done, and with that seed.
    other = {**baseline, "config_hash": "b", "value": 0.55}
    for name, more, verdict in (
        ("killed", [], "beaten by word overlap"),
        ("begun", [{**seeds[0], "config_hash": "b"}], "ahead of word overlap"),
    ):
        (task,) = summarize(write_run(tmp_path / name, [*metrics(), *seeds, baseline, other, *more]))["tasks"]
        assert verdict in task["verdict"] and [each["value"] for each in task["baselines"]] == [0.55 if more else 0.88]
    (task,) = summarize(write_run(tmp_path / "alone", [*metrics(), baseline, other]))["tasks"]
    assert [each["value"] for each in task["baselines"]] == [0.55]


def test_scores_of_what_was_chosen_by_the_rows_that_are_scored_say_so(tmp_path: Path) -> None:
    said = "chosen by the rows that are scored here (select_on: dev): the scores of the network are a little too good"
    for chosen_on in ("dev", "train"):
        first, *others = finetunings([0.67, 0.66, 0.68], [0.50, 0.49, 0.51])
        folder = write_run(tmp_path / chosen_on, [*metrics(), {**first, "selected_on": chosen_on}, *others])
        assert (f"\n{said}" in summary_text(folder)) == (chosen_on == "dev")
        assert summarize(folder)["finished"]


def test_squad_scores_are_per_cent_already_and_correlations_have_no_per_cent_sign(tmp_path: Path) -> None:
    squad = {"kind": "finetune", "name": "squad", "task": "squad", "seed": 0, "init": "pretrained", "metric": "f1", "value": 61.25}
    squad["metrics"] = {"exact_match": 50.5, "f1": 61.25}
    stsb = {"kind": "finetune", "name": "stsb", "task": "stsb", "seed": 0, "init": "pretrained", "metric": "spearman", "value": 0.875}
    folder = write_run(tmp_path / "run", [*metrics(), squad, stsb], settings(finetune={}))
    text = summary_text(folder)
    assert "61.2 %" in text and "87.5\n" in text.replace("  ", "\n") and "87.5 %" not in text
    assert summarize(folder)["tasks"][0]["pretrained"]["others"] == {"exact_match": 50.5}


def test_the_text_holds_every_seed_the_median_the_spread_and_the_verdict(tmp_path: Path) -> None:
    text = summary_text(write_run(tmp_path / "run", metrics() + finetunings([0.671, 0.665, 0.679], [0.502, 0.497, 0.508])))
    for part in (
        "67.1 %",
        "66.5 %",
        "67.9 %",
        "50.2 %",
        "49.7 %",
        "50.8 %",
        "1.4",
        "1.1",
        "word overlap",
        "88.0 %",
        "pretraining does not win: beaten by word overlap; ahead of random init",
    ):
        assert part in text
    table = [row for row in text.splitlines() if row.startswith(("short", "long"))]
    assert len(table) == 2 and len({len(row) for row in table}) == 1, "columns are aligned"


@pytest.mark.parametrize("width", [60, 80])
def test_the_tables_fit_a_narrow_terminal_in_columns(tmp_path: Path, width: int) -> None:
    folder = write_run(tmp_path / "run", metrics() + finetunings([0.67, 0.66, 0.68], [0.50, 0.49, 0.51]))
    phases, task = [block.splitlines() for block in summary_text(folder, width).split("\n\n")[1:3]]
    assert all(len(line) <= width for line in [*phases, *task[:4]])
    assert re.fullmatch(r"long +50 +3\.294 +43\.2 % +82\.8 % +45 s +7,807", phases[-1])
    assert task[2].startswith("random init ") and len(task) == 5


def test_the_device_is_the_gpu_unless_the_run_asked_for_the_cpu(tmp_path: Path) -> None:
    machine = {"cpu": {"model": "P", "cores": 8}, "gpus": [{"name": "Card"}, {"name": "Card"}]}
    assert summarize(write_run(tmp_path / "a", [], environment=machine))["device"] == "2 x Card"
    assert summarize(write_run(tmp_path / "b", [], settings(compute={"device": "cpu"}), machine))["device"] == "P, 8 cores"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (432, "7 min 12 s"), (11100, "3 h 05 min")]
)
def test_times_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_steps_of_a_run_with_a_budget_are_those_that_it_decided(tmp_path: Path) -> None:
    def decision(phase: str, step: int, steps: int) -> dict[str, object]:
        return {"kind": "event", "event": "budget", "message": "", "phase": phase, "global_step": step, "step": step, "steps": steps}

    lines = [*metrics(), decision("short", 10, 700), decision("short", 150, 200)]
    rows = summarize(write_run(tmp_path / "run", lines, settings(budget="8h")))["phases"]
    assert [(row["steps"], row["planned"], row["finished"]) for row in rows] == [(200, 200, True), (50, None, True)]
    # The recipe has only shares of the time.
    assert [row["planned"] for row in summarize(write_run(tmp_path / "fixed", lines))["phases"]] == [200, 50]


def test_what_a_byte_model_writes_does_not_command_the_terminal(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", byte_metrics(), byte_settings())
    (folder / "samples.json").write_text(json.dumps({"checkpoint": "x", "texts": [{"prompt": "It was", "text": " a\x1b[2J\nfilm"}]}))
    assert "- It was | a\ufffd[2J film" in summary_text(folder)
