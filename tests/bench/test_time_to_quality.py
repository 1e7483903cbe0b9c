"""The campaign of quality for time gives everyone the same text and minutes, does nothing twice, and says what each took."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("accelerate")
from benchmarks import time_to_quality
from benchmarks.quality_by_tokens import points
from benchmarks.quality_by_tokens import table as table_by_tokens
from benchmarks.time_to_quality import NAMES, beyond, main, spreads, table, write
from overnight import config
from overnight.config import BertRun
from overnight.corpus.shards import load_manifest
from tests.bench.in_process import Calls, calls

__all__ = ["calls"]


@pytest.fixture
def arguments(tiny: Callable[..., BertRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a campaign of seconds."""
    run = tiny()
    for name in ("published", "modern"):
        (tmp_path / f"{name}.yaml").write_text(config.run_yaml(run), encoding="utf-8")
    monkeypatch.setattr(time_to_quality, "BATCHES", (4,))
    monkeypatch.setattr(time_to_quality, "RATES", (1e-3, 1e-2))
    monkeypatch.setattr(time_to_quality, "GROWTH", 0)
    words = f"--minutes 0.002 0.004 --seeds 4 --threads 1 --vocab-size 600 --layers 1 --width 32 --heads 2 --length 32 --pairs 3 --paths {run.data.paths[0]}"
    words += f" --sweep-minutes 0.002 --trial-seconds 0.02 --published {tmp_path}/published.yaml --modern {tmp_path}/modern.yaml"
    return [*words.split(), "--blimp", "", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "out")]


def result(row: str, minutes: float, seed: int, bits: float, **scores: float) -> dict[str, Any]:
    """A result as the campaign keeps it."""
    facts = {"row": row, "name": NAMES[row], "minutes": minutes, "seed": seed, "seconds": 60 * minutes, "steps": 1}
    return {**facts, "scores": {"bits_per_character": bits, **scores}}


@pytest.mark.heavy
def test_all_four_are_trained_on_one_text_and_nothing_is_done_twice(
    arguments: list[str], tmp_path: Path, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    main(arguments)
    shown = capsys.readouterr().out
    out = tmp_path / "out"
    kept = {path.name: json.loads(path.read_text()) for path in out.glob("[abcd]-*.json")}
    assert set(kept) == {f"{row}-{m}m-seed4.json" for row in "abcd" for m in ("0.002", "0.004")}
    assert all(found["steps"] >= 1 and found["scores"]["bits_per_character"] > 0 for found in kept.values())
    peers = calls.of("benchmarks.mlm_peer")
    # The sweep, b for each of the minutes, and a once for both.
    assert len(peers) == 2 + 2 + 1 and len(calls.of("evaluate")) == 8
    (both,) = (words for words in peers if words[words.index("--minutes") + 2] == "0.004")
    assert both[both.index("--lr") + 1] == "5e-05" and kept["a-0.002m-seed4.json"]["schedule_minutes"] == 0.004
    trials = [json.loads(path.read_text()) for path in out.glob("sweep-*.json")]
    losses = {trial["settings"]["lr"]: trial["valid_loss"] or math.inf for trial in trials}
    (chosen,) = {kept[f"b-{m}m-seed4.json"]["settings"]["lr"] for m in ("0.002", "0.004")}
    # Not the rate itself: on a busy machine the trials may have a step each, and the same loss.
    assert len(trials) == 2 and losses[chosen] == min(losses.values())
    # One text, one vocabulary, one size; the published recipe has its first phase only.
    folder = tmp_path / "work" / "data"
    assert {words[words.index("--data") + 1] for words in peers} == {str(folder)} and load_manifest(folder).vocab_size == 600
    runs = {row: config.stored_run(tmp_path / "work" / f"{row}-0.004m-seed4" / "run") for row in "cd"}
    assert [list(run.phases) for run in runs.values()] == [["short"], ["short", "long"]]
    assert {(run.data_dir, run.data.vocab_size, run.seed, run.model.hidden_size) for run in runs.values()} == {(folder, 600, 4, 32)}
    for name in NAMES.values():
        assert f"| {name} | " in shown
    ElementTree.parse(out / "quality.svg")
    before = len(calls)
    main(arguments)
    assert calls[before:] == calls.of("prepare")[-1:] and (out / "table.md").read_text() in capsys.readouterr().out + "\n"


@pytest.mark.heavy
def test_a_campaign_that_was_stopped_trains_anew_only_what_has_no_result(arguments: list[str], tmp_path: Path, calls: Calls) -> None:
    arguments += ["--only", "a", "c"]
    main(arguments)
    (tmp_path / "out" / "a-0.004m-seed4.json").unlink()
    (tmp_path / "out" / "c-0.004m-seed4.json").unlink()
    (tmp_path / "work" / "c-0.004m-seed4" / "training.json").unlink()
    before = len(calls)
    main(arguments)
    names = [words[0] for words in calls[before:]]
    # c's training was cut, so its time begins anew; a's was whole, and its models were evaluated.
    assert names.count("benchmarks.mlm_peer") == 0 and set(names) == {"prepare", "pretrain"} | {"evaluate"}
    with pytest.raises(SystemExit, match="another study"):
        main([*arguments, "--vocab-size", "500"])
    with pytest.raises(SystemExit, match="no recipe 'nothing'"):
        main([*arguments, "--modern", "nothing", "--only", "d", "--out", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


def test_a_grid_grows_where_its_best_is_at_an_edge() -> None:
    assert beyond({1e-4: 3.0, 2e-4: 2.0, 4e-4: 1.0}) == 8e-4
    assert beyond({1e-4: 1.0, 2e-4: 2.0, 4e-4: 3.0}) == 5e-5
    assert beyond({1e-4: 2.0, 2e-4: 1.0, 4e-4: math.inf}) is None
    assert beyond({1e-4: math.inf, 2e-4: math.inf}) == 5e-5, "where all diverge it grows down"


def test_the_table_has_the_seeds_range_and_what_took_longer() -> None:
    results = [
        result("a", 3, 0, 4.0),
        result("a", 3, 1, 4.2),
        result("a", 3, 2, 4.1),
        result("d", 3, 0, 2.0, blimp=0.65),
        result("d", 6, 0, 1.9),
    ]
    results[-1]["seconds"] = 400.0
    lines = list(table(results))
    assert "| run_mlm.py, its defaults | 4.100 (4.000–4.200) | - |" in lines
    assert "| overnight, modern | 2.000 (2.000–2.000) | 1.900 (1.900–1.900) |" in lines
    assert lines.count("| overnight, modern | 65.0 (65.0–65.0) | - |") == 1
    assert [line for line in lines if "took" in line] == ["- overnight, modern, 6 min, seed 0, took 6.67 minutes."]
    assert list(spreads(results, "blimp")) == ["overnight, modern"]


def test_the_picture_has_a_line_for_each_and_can_be_drawn_again(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps({"size": {"layers": 6, "width": 256}, "threads": 2}))
    for row, bits in zip("abcd", (4.0, 3.5, 3.0, 2.5), strict=True):
        for minutes in (3, 60):
            path = tmp_path / f"{row}-{minutes}m-seed0.json"
            path.write_text(json.dumps(result(row, minutes, 0, bits - minutes / 100, blimp=0.6)))
    main(["--draw", "--out", str(tmp_path)])
    drawn = (tmp_path / "quality.svg").read_text()
    assert all(name in drawn for name in (*NAMES.values(), "bits per character", "BLiMP, %", "minutes of training"))
    write(tmp_path)
    assert (tmp_path / "quality.svg").read_text() == drawn
    assert len(json.loads((tmp_path / "summary.json").read_text())["results"]) == 8


def test_results_that_were_scored_on_different_texts_are_not_drawn_together(tmp_path: Path) -> None:
    for row, characters in (("c", 800), ("d", 1790)):
        (tmp_path / f"{row}-3m-seed0.json").write_text(json.dumps(result(row, 3, 0, 2.0, characters=characters)))
    with pytest.raises(
        SystemExit, match=r"800 characters \(overnight, BERT as published, 3 min, seed 0\), 1,790 characters \(overnight, modern"
    ):
        write(tmp_path)
    assert not (tmp_path / "table.md").exists()


def test_all_kept_trainings_stand_by_their_tokens_and_the_peers_read_full_sequences(tmp_path: Path) -> None:
    ours, peer = result("d", 6, 0, 1.4), result("b", 6, 0, 2.3)
    kept = {"first": ours | {"tokens": 4_200_000}, "second": peer | {"steps": 500, "settings": {"batch": 32}}}
    for folder, training in kept.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{training['row']}-6m-seed0.json").write_text(json.dumps(training), encoding="utf-8")
    found = {point.name: point.millions for point in points(tmp_path)}
    assert found == {NAMES["d"]: 4.2, NAMES["b"]: pytest.approx(500 * 32 * 128 / 1e6)}
    assert [line.split(" | ")[3] for line in [*table_by_tokens(points(tmp_path))][2:]] == ["1.400", "2.300"]
