"""The study of learning-rate rules gives each the same text, and calls diverged what is worse than knowing nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import batch_rules
from benchmarks.batch_rules import RULES, TINY, Study, Trial, cell, frequencies, main, read, recipe, spreads, table, train, write
from overnight import config
from overnight.corpus.pipeline import prepare

SMALL = replace(TINY, times=(2, 8), characters=1 << 11)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("rules")
    reviews = [{"reviewText": f"review {i}: it was {'good' if i % 2 else 'bad'} {'la ' * (i % 9)}"} for i in range(2000)]
    (folder / "reviews.json").write_text("\n".join(map(json.dumps, reviews)))
    paths = [str(folder / "reviews.json")]
    run = config.build_run(recipe(SMALL, paths, folder / "data") | {"phases": {"main": {"steps": 1, "global_batch_size": 1}}})
    prepare(run.data, folder / "data", log=lambda words: None)
    return paths, folder / "data"


def test_the_rates_are_the_published_ones() -> None:
    assert [RULES[name](16) for name in ("linear", "square root", "fixed low", "fixed high")] == pytest.approx([8e-3, 2e-3, 5e-4, 3e-3])
    study = Study()
    assert all(study.steps(study.base * t) * study.base * t * study.length == study.characters for t in study.times)


@pytest.mark.heavy
def test_a_training_reports_the_validation_bits_of_its_last_step(text: tuple[list[str], Path]) -> None:
    found = train(SMALL, *text, "fixed high", 8, seed=1)
    assert (found.batch, found.lr, found.message) == (16, 3e-3, "")
    assert found.bits is not None and 1 < found.bits < 8
    assert found.bits == train(SMALL, *text, "fixed high", 8, seed=1).bits != train(SMALL, *text, "fixed high", 8, seed=2).bits


@pytest.mark.heavy
def test_a_loss_that_is_no_number_ends_a_training_and_is_said(text: tuple[list[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "linear", lambda times: 1e38)
    found = train(SMALL, *text, "linear", 2, seed=1)
    assert found.bits is None and "not finite" in found.message


def test_what_is_done_is_not_done_again_and_the_table_says_what_diverged(
    text: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cell(tmp_path, SMALL, *text, "fixed low", 2, 1)
    monkeypatch.setattr(batch_rules, "train", lambda *args: pytest.fail("trained again"))
    assert cell(tmp_path, SMALL, *text, "fixed low", 2, 1) == first
    done = read(tmp_path)
    # The others stand in for trainings: one no number, one worse than knowing nothing, one good.
    more = [
        Trial("linear", 4, 1.0, 1, None, "no", 1.0),
        Trial("linear", 4, 1.0, 2, 3.0, "", 1.0),
        Trial("linear", 16, 1.0, 1, 99.0, "", 1.0),
    ]
    with open(tmp_path / "trials.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(vars(trial)) + "\n" for trial in more)
    write(tmp_path, replace(SMALL, seeds=(1,)), text[1])
    shown = capsys.readouterr().out
    assert f"{done[0].bits:.3f}" in shown and "| diverged (3.000 with one seed), lr 0.001 |" in shown and "| diverged, lr 0.004 |" in shown
    assert json.loads((tmp_path / "summary.json").read_text())["frequencies"] == frequencies(text[1])
    ElementTree.parse(tmp_path / "rules.svg")


def test_the_frequencies_are_the_entropy_of_the_validation_bytes(text: tuple[list[str], Path]) -> None:
    assert 3 < frequencies(text[1]) < 5
    found = spreads([Trial("linear", 4, 1.0, 1, 2.0, "", 1.0), Trial("linear", 4, 1.0, 2, 4.0, "", 1.0)])
    assert (found["linear"][4].median, found["linear"][4].low, found["linear"][4].high) == (3.0, 2.0, 4.0)
    assert math.isinf(spreads([Trial("linear", 4, 1.0, 1, 8.1, "", 1.0)])["linear"][4].low)
    lines = table(SMALL, found, 5.0)
    assert "| 4 | 32 | 3.000 (2.000–4.000), lr 0.001 | -, lr 0.00071 |" in lines[-2] and lines[-1].startswith("| 16 | 8 | -, ")


def test_trials_of_another_text_are_not_taken_for_those_of_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the rest is of no concern")

    monkeypatch.setattr(batch_rules, "prepare", stop)
    with pytest.raises(RuntimeError, match="no concern"):
        main(["--tiny", "--paths", "one.json", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"are of another study .*paths"):
        main(["--tiny", "--paths", "other.json", "--out", str(tmp_path)])


@pytest.mark.heavy
def test_the_command_runs_all_of_it(text: tuple[list[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_rules, "TINY", replace(SMALL, times=(2,), seeds=(1,)))
    main(["--tiny", "--workers", "1", "--paths", *text[0], "--data", str(text[1]), "--out", str(tmp_path)])
    assert {t.rule for t in read(tmp_path / "tiny")} == set(RULES)
