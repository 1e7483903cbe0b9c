"""The study of the auxiliary objective trains with it and without on the same data, and says what came out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import auxiliary
from benchmarks.auxiliary import WEIGHTS, Trial, blind, main, report


@pytest.mark.heavy
def test_the_command_trains_with_every_weight_and_does_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["good", "bad"]
    reviews = [{"reviewText": f"review {i} was {words[i % 2]} {'la ' * (i % 9)}", "overall": 5.0 - 4 * (i % 2)} for i in range(1500)]
    (tmp_path / "reviews.json").write_text("\n".join(map(json.dumps, reviews)))
    (tmp_path / "sst").mkdir()
    for part, count in (("train", 60), ("dev", 20), ("test", 20)):
        rows = [f"{i % 2},this was {words[1 - i % 2]} {i}" for i in range(count)]
        (tmp_path / "sst" / f"{part}_binary_sent.csv").write_text("\n".join(["label,sentence", *rows, ""]))
    arguments = ["--paths", str(tmp_path / "reviews.json"), "--sst", str(tmp_path / "sst"), "--data", str(tmp_path / "data")]
    arguments += ["--width", "8", "--characters", "16384", "--seeds", "1", "--out", str(tmp_path / "out")]
    main(arguments)
    trials = [Trial(**json.loads(line)) for line in (tmp_path / "out" / "trials.jsonl").read_text().splitlines()]
    assert [t.weight for t in trials] == list(WEIGHTS)
    assert trials[0].error is None and all(t.error is not None and 0 < t.error < 6 for t in trials[1:])
    assert all(1 < t.bits < 9 and 0 <= t.accuracy <= 1 for t in trials)
    assert blind(tmp_path / "data") == pytest.approx(2.0, abs=0.1)
    shown = capsys.readouterr().out
    main(arguments)
    assert shown.endswith(capsys.readouterr().out), "what is done is read again"
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["report"][-1].startswith("| 1 | ")


def test_the_table_has_the_mean_and_the_range_of_the_seeds() -> None:
    lines = report([Trial(0.0, 1, 2.0, None, 0.5, 1.0), Trial(0.0, 2, 3.0, None, 0.7, 1.0), Trial(1.0, 1, 2.0, 0.9, 0.6, 1.0)], 1.1)
    assert lines[-2:] == [
        "| 0 | 2.500 (2.000–3.000) | - | 60.0 (50.0–70.0) |",
        "| 1 | 2.000 (2.000–2.000) | 0.900 (0.900–0.900) | 60.0 (60.0–60.0) |",
    ]


def test_trials_of_another_study_are_not_taken_for_those_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> None:
        raise RuntimeError("the rest is of no concern")

    monkeypatch.setattr(auxiliary, "read_probe_task", stop)
    with pytest.raises(RuntimeError, match="no concern"):
        main(["--width", "8", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"are of another study .*width"):
        main(["--width", "16", "--out", str(tmp_path)])
