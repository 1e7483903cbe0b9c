"""A timed training takes as many steps as fit, with the shares of its recipe, and is evaluated on the text that nobody trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import timed_training
from benchmarks.timed_training import (
    Yardstick,
    data_override,
    keep_study,
    pretrain_for,
    scaled_settings,
    scaled_steps,
    takes_budget,
    validation_text,
)
from overnight import config
from overnight.cli.main import main as overnight
from overnight.config import BertRun, Run
from overnight.corpus.clean import clean
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import open_shards
from overnight.corpus.tokenizer import Encoder, load_tokenizer
from tests.bench.in_process import Calls, calls

__all__ = ["calls"]


@pytest.fixture
def recipe(tiny: Callable[..., BertRun], tmp_path: Path) -> str:
    """The smallest recipe, as a file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(config.run_yaml(tiny()), encoding="utf-8")
    return str(path)


def test_the_steps_of_the_phases_keep_their_shares_and_fill_the_time(tiny: Callable[..., BertRun]) -> None:
    run = tiny(**{"phases.short.steps": 600, "phases.long.steps": 400})
    seconds = {"short": 0.01, "long": 0.03}
    steps = scaled_steps(run, seconds, 72.0)
    # A step has 8 sequences: 600 * 0.08 + 400 * 0.24 = 144 s in the recipe.
    assert steps == {"short": 300, "long": 200}
    assert sum(steps[name] * 8 * seconds[name] for name in steps) == pytest.approx(72)
    assert scaled_steps(run, seconds, -1.0) == {"short": 1, "long": 1}, "a start that takes longer than the time"


def test_whatever_counts_steps_is_scaled_with_them(tiny: Callable[..., BertRun]) -> None:
    warmup = {"initial_batch_size": 4, "steps": 300}
    run = tiny(**{"phases.short.steps": 600, "phases.long.steps": 400, "phases.short.batch_warmup": warmup})
    plain = scaled_steps(
        replace(run, phases={"short": replace(run.phases["short"], batch_warmup=config.BatchWarmup())}), {"short": 1.0}, 4800
    )
    grown = scaled_steps(replace(run, phases={"short": run.phases["short"]}), {"short": 1.0}, 4800)
    assert plain["short"] == 600 < grown["short"], "smaller batches at the beginning leave time for more steps"
    made = scaled_settings(run, {"short": 60, "long": 200})
    assert made == ["phases.short.steps=60", "phases.short.batch_warmup.steps=30", "phases.long.steps=200"]


def test_a_budget_is_given_where_the_setting_exists_and_every_schedule_can_be_cut(recipe: str) -> None:
    exists = "budget" in {field.name for field in fields(BertRun)}
    wsd = [f"phases.{name}.optim.schedule={{name: wsd, warmup_ratio: 0.1, stable_ratio: 0.6}}" for name in ("short", "long")]
    assert takes_budget(recipe, wsd, 6) == exists
    assert not takes_budget(recipe, [], 6) and not takes_budget(recipe, wsd[:1], 6), "a polynomial ends at its own step"


def test_the_speed_of_each_phase_is_measured_and_fills_the_time(
    recipe: str, tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_training, "_TRIES", 1)  # two seconds are never met to a tenth
    trained = pretrain_for(recipe, ["seed=3"], tmp_path / "out", 0.03, 1, trial_seconds=0.1)
    trials, (final,) = calls.of("pretrain")[:-1], calls.of("pretrain")[-1:]
    assert trials and f"--out={tmp_path / 'out' / 'trial'}" in trials[0] and f"--out={tmp_path / 'out' / 'run'}" in final
    assert trained.steps == sum(trained.schedule.values()) and not trained.by_budget and trained.tokens
    run = config.stored_run(tmp_path / "out" / "run")
    assert {name: phase.steps for name, phase in run.phases.items()} == trained.schedule
    assert (run.seed, run.logging.eval_every, run.compute.threads) == (3, 0, 1)
    assert not (tmp_path / "out" / "trial").exists()


def test_a_training_whose_trial_was_disturbed_is_done_again_for_the_time_asked_for(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def run_module(module: str, words: list[str], log: Path, threads: int) -> float:
        (steps,) = (int(word.rpartition("=")[2]) for word in words if word.startswith("--phases.short.steps="))
        asked.append(steps)
        (tmp_path / "out" / "run").mkdir(parents=True)
        return 10 + 0.02 * steps

    monkeypatch.setattr(timed_training, "run_module", run_module)
    monkeypatch.setattr(timed_training, "measure_speed", lambda run, *_: (10.0, {name: 0.01 for name in run.phases}))
    monkeypatch.setattr(timed_training, "train_lines", lambda folder: [{"global_step": asked[-1], "tokens": 0}])
    trained = pretrain_for(recipe, [], tmp_path / "out", 1.0, 1, trial_seconds=0.1)
    assert len(asked) == 2 and trained.steps == asked[1] and abs(trained.seconds - 60) < 6
    assert trained.schedule["short"] == asked[1] != asked[0]


def test_without_minutes_the_steps_are_those_of_the_recipe(recipe: str, tmp_path: Path, calls: Calls) -> None:
    trained = pretrain_for(recipe, ["phases.short.steps=3", "phases.long.steps=2"], tmp_path / "out", 0, 1, trial_seconds=0.1)
    assert (trained.steps, trained.by_budget, trained.schedule) == (5, False, {}) and len(calls.of("pretrain")) == 1


def test_the_validation_text_is_the_raw_text_of_the_validation_documents(tiny: Callable[..., Run], tmp_path: Path) -> None:
    run = tiny()
    text = validation_text(run, tmp_path / "validation.txt").read_text(encoding="utf-8")
    names = json.loads((run.data_dir / "manifest.json").read_text())["first_documents"]["valid"]
    topics = [json.loads(line)["text"] for line in Path(run.data.paths[0]).read_text(encoding="utf-8").splitlines()]
    wanted = [topics[int(name.rpartition("#")[2]) - 1] for name in names]
    assert len(wanted) > 2 and all(one in text for one in wanted) and len(text) == sum(map(len, wanted)) + 2 * (len(wanted) - 1)
    found, *_ = Encoder(load_tokenizer(run.data_dir)).encode(["\n".join(sentences(clean(one))) for one in wanted])
    assert np.array_equal(found, np.concatenate([shard.tokens for shard in open_shards(run.data_dir, "valid")])), "and no other"
    lost = replace(run, data=replace(run.data, paths=[str(tmp_path / "validation.txt")]))
    with pytest.raises(SystemExit, match=r"names \d+ validation documents, 0 are in data\.paths"):
        validation_text(lost, tmp_path / "again.txt")


def test_all_data_settings_go_from_one_run_to_another(tiny: Callable[..., Run], recipe: str, tmp_path: Path) -> None:
    run = tiny(**{"data.min_chars": 7, "data.lowercase": False})
    other = config.load_run(recipe, [data_override(run, tmp_path / "there", vocab_size=700)])
    assert other.data == replace(run.data, dir=str(tmp_path / "there"), vocab_size=700)


def test_a_command_that_fails_ends_the_campaign_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"ended with 2[\s\S]*no recipe 'nothing'"):
        timed_training.run_module("overnight", ["plan", "nothing"], tmp_path / "log.txt", 1)
    assert "$ " in (tmp_path / "log.txt").read_text()


def test_results_of_another_study_are_refused(tmp_path: Path) -> None:
    keep_study(tmp_path, {"minutes": 6, "paths": ("a", "b")})
    keep_study(tmp_path, {"minutes": 6, "paths": ("a", "b")})
    with pytest.raises(SystemExit, match="minutes: 6 there, 3 here"):
        keep_study(tmp_path, {"minutes": 3, "paths": ("a", "b")})


def test_the_scores_are_those_of_the_command(pretrained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_training, "run_module", lambda module, words, log, threads: overnight([str(word) for word in words]))
    text = validation_text(pretrained, tmp_path / "validation.txt")
    folder = Path(shutil.copytree(pretrained.run_dir, tmp_path / "run"))  # which keeps what it was measured at
    scores = Yardstick(text, "", 0)(folder, tmp_path / "scores.json", 1)
    assert 0 < scores["bits_per_character"] < 8 and 0 <= scores["masked_accuracy"] <= 1
