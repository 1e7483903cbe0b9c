"""`overnight run` and `plan` with a budget: all stages fit into it, its tasks are estimated by a rehearsal, and it may be killed anywhere."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from overnight import config
from overnight.cli import run as stages
from overnight.cli import time_plan
from overnight.cli.main import main
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import load_manifest
from overnight.engine.budget_record import read_record
from overnight.evaluation import rehearsal
from overnight.report.summary import summarize
from tests.cli.test_run import results, scores, write_recipe
from tests.conftest import modern_settings, tiny_tree
from tests.engine.test_planner import FakeClock, clock  # noqa: F401
from tests.engine.test_pretrain import Stop

Captured = pytest.CaptureFixture[str]
SCHEDULE = {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.5}


@pytest.fixture
def recipe(tmp_path: Path, tiny_data: Path) -> Path:
    """The recipe of a run with a task, whose phases a budget can cut."""
    path = write_recipe(tmp_path, tiny_data.parent / "topics.jsonl")
    tree = yaml.safe_load(path.read_text())
    for phase in tree["phases"].values():
        phase["optim"]["schedule"] = SCHEDULE
        phase["micro_batch_size"] = phase["global_batch_size"]
    tree["logging"]["eval_every"] = tree["checkpoint"]["save_every"] = 20
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates in the time of the clock that only steps move: all seeds of the task."""
    monkeypatch.setattr(time_plan, "finetune_seconds", lambda run, name, corpus: 20.0)
    monkeypatch.setattr(time_plan, "evaluation_seconds", lambda run: 5.0)


@pytest.mark.usefixtures("rehearsed")
def test_all_stages_end_in_time_and_it_says_so(recipe: Path, clock: FakeClock, capsys: Captured) -> None:  # noqa: F811
    clock.step_seconds = 0.5
    assert main(["run", str(recipe), "--budget=2m"]) == 0
    out = capsys.readouterr().out
    run = config.load_run(str(recipe), ["budget=2m"])
    record = read_record(run)
    assert record is not None and record.after == {"opinion": 20.0, "evaluation": 5.0, "export and report": 6.0}
    assert "what follows pretraining is estimated at opinion 20 s, evaluation 5 s, export and report 6 s" in out
    # Two seeds, pretrained and not, of nine steps.
    assert record.trained is not None and record.done is not None and record.done - record.trained == 4 * 9 * clock.step_seconds
    assert 10 < record.deadline - record.done < 30 and "before the deadline; what followed pretraining took 18 s (estimated: 31 s)" in out
    assert "pretraining is not finished" not in out
    rows = summarize(run.run_dir)["phases"]
    assert [(row["steps"], row["finished"]) for row in rows] == [(record.of(name)[-1].steps, True) for name in ("short", "long")]
    before = results(run)
    assert main(["run", str(recipe), "--budget=2m"]) == 0
    assert "done in " in out and "this command took " not in out
    again = capsys.readouterr().out
    assert "all phases are done" in again and "this command took " in again and "done in " not in again and "budget 2m: done at " in again
    assert results(run) == before and read_record(run) == record


@pytest.mark.heavy
@pytest.mark.usefixtures("rehearsed")
def test_another_night_continues_from_before_the_decay_and_does_the_rest_again(recipe: Path, clock: FakeClock, capsys: Captured) -> None:  # noqa: F811
    clock.step_seconds = 0.5
    run = config.load_run(str(recipe), ["budget=70s"])
    assert main(["run", str(recipe), "--budget=70s"]) == 0
    first, exported = read_record(run), (run.run_dir / "export" / "model.safetensors").read_bytes()
    clock.stop_at = clock.steps + 30
    with pytest.raises(Stop):
        main(["run", str(recipe), "--budget=80s", "--extend"])
    clock.stop_at = -1
    assert main(["run", str(recipe), "--budget=80s", "--extend"]) == 0
    out, record = capsys.readouterr().out, read_record(run)
    assert out.count("before its decay, and continues until") == 1 and "continuing at step" in out
    assert first is not None and record is not None and record.extended == 1 and record.after == first.after
    assert record.done is not None and record.deadline - record.started == 80 and 0 < record.deadline - record.done < 40
    assert record.of("short")[-1].steps > first.of("short")[-1].steps + 5
    assert (run.run_dir / "export" / "model.safetensors").read_bytes() != exported
    # Two seeds, pretrained and not, of the new network; those of the old one stay.
    assert len(scores(run)) == 8 and (run.run_dir / "before-1" / "tasks.jsonl").is_file()
    assert summarize(run.run_dir)["phases"][0]["steps"] == record.of("short")[-1].steps


@pytest.mark.usefixtures("rehearsed")
def test_another_night_begins_once_though_it_is_over_before_training(
    recipe: Path,
    clock: FakeClock,  # noqa: F811
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["run", str(recipe), "--budget=70s"]) == 0

    def slow(*args: Any, **kwargs: Any) -> None:
        clock.now += 100
        prepare(*args, **kwargs)

    monkeypatch.setattr(stages, "prepare", slow)
    assert main(["run", str(recipe), "--budget=80s", "--extend"]) == 0
    record = read_record(config.load_run(str(recipe), ["budget=80s"]))
    assert record is not None and record.extended == 1 and record.done is not None and record.done > record.deadline
    assert "budget 80s: ended at" in capsys.readouterr().out


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
@pytest.mark.usefixtures("rehearsed")
def test_a_clock_that_is_set_while_the_text_is_prepared_changes_nothing(
    jump: float,
    recipe: Path,
    clock: FakeClock,  # noqa: F811
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow(*args: Any, **kwargs: Any) -> None:
        clock.now, clock.set_forward = clock.now + 7, jump
        prepare(*args, **kwargs)

    monkeypatch.setattr(stages, "prepare", slow)
    clock.stop_at = 1
    with pytest.raises(Stop):
        main(["run", str(recipe), "--budget=2m"])
    record, out = read_record(config.load_run(str(recipe), ["budget=2m"])), capsys.readouterr().out
    assert record is not None and record.deadline == clock.wall() + 120 - (clock.now - 1000) and record.seconds == 120
    assert out.count(f"was set 1 h 00 min {'forward' if jump > 0 else 'back'}") == 1


@pytest.mark.heavy
@pytest.mark.usefixtures("rehearsed")
def test_another_night_keeps_the_time_of_its_own_tasks_free(
    recipe: Path,
    clock: FakeClock,  # noqa: F811
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = config.load_run(str(recipe), ["budget=30s"])
    # Pretraining alone keeps no time free, and what follows later is none of its budget.
    assert [main([command, str(recipe), *budget]) for command, *budget in (["prepare"], ["pretrain", "--budget=30s"])] == [0, 0]
    assert main(["run", str(recipe), "--budget=30s"]) == 0
    closed = read_record(run)
    assert closed is not None and closed.after is None and capsys.readouterr().out.count("budget 30s: done at") == 1
    for seconds in (20.0, 40.0):
        monkeypatch.setattr(time_plan, "finetune_seconds", lambda run, name, corpus, seconds=seconds: seconds)
        assert main(["run", str(recipe), "--budget=90s", "--extend"]) == 0
        record, said = read_record(run), f"what follows pretraining is estimated at opinion {seconds:.0f} s, evaluation 5 s"
        assert record is not None and record.after == {"opinion": seconds, "evaluation": 5.0, "export and report": 6.0}
        assert record.trained == pytest.approx(record.deadline - 1.1 * (seconds + 11), abs=4) and said in capsys.readouterr().out


@pytest.mark.usefixtures("rehearsed")
def test_killed_in_a_task_it_keeps_its_deadline_and_its_scores(recipe: Path, clock: FakeClock, capsys: Captured, tmp_path: Path) -> None:  # noqa: F811
    clock.stop_at, clock.step_seconds = 175, 0.5
    with pytest.raises(Stop):
        main(["run", str(recipe), "--budget=2m"])
    clock.stop_at, clock.now = -1, clock.now + 5
    run = config.load_run(str(recipe), ["budget=2m"])
    begun = read_record(run)
    assert begun is not None and begun.trained is not None and begun.done is None
    assert main(["run", str(recipe), "--budget=2m"]) == 0
    ended = read_record(run)
    assert ended is not None and (ended.deadline, ended.trained, ended.decisions) == (begun.deadline, begun.trained, begun.decisions)
    assert [score[:2] for score in scores(run)] == [("pretrained", 0), ("pretrained", 1), ("random", 0), ("random", 1)]


@pytest.mark.usefixtures("rehearsed")
def test_a_budget_that_its_tasks_fill_is_refused_before_training_with_the_least(recipe: Path, clock: FakeClock, capsys: Captured) -> None:  # noqa: F811
    assert main(["run", str(recipe), "--budget=30s"]) == 2
    assert "is estimated at 31 s; the least that leaves a tenth for pretraining is 1 min 00 s" in capsys.readouterr().err
    assert not (recipe.parent / "run" / "run.yaml").exists()
    assert main(["run", str(recipe), "--budget=1m"]) == 0, "a longer one begins anew"


def test_the_rehearsal_of_a_task_comes_near_and_writes_nothing(recipe: Path, tiny_data: Path) -> None:
    run = config.load_run(str(recipe), [f"data.dir={tiny_data}"])
    before = sorted(recipe.parent.rglob("*"))
    after = time_plan.seconds_after_pretraining(run)
    assert list(after) == ["opinion", "evaluation", "export and report"] and 1 < after["opinion"] < 600 and 0 < after["evaluation"] < 600
    assert sorted(recipe.parent.rglob("*")) == before


@pytest.mark.parametrize(("budget", "begun_anew"), [("8h", True), ("until 07:00", False)])
def test_a_length_of_time_begins_anew_after_an_error_before_training_and_a_time_of_day_stays(
    budget: str,
    begun_anew: bool,
    recipe: Path,
    clock: FakeClock,  # noqa: F811
    capsys: Captured,
) -> None:
    command = ["run", str(recipe), f"--budget={budget}", "--data.paths=nowhere"]
    run = config.load_run(str(recipe), [f"budget={budget}"])
    assert main(command) != 0
    begun = read_record(run)
    clock.now += 300
    assert main(command) != 0
    out, record = capsys.readouterr().out, read_record(run)
    assert begun is not None and record is not None and begun.failed
    assert (f"budget {budget} begins now (an error ended an earlier attempt before training)" in out) == begun_anew
    assert (f"budget {budget}: its time began at" in out) != begun_anew
    assert record.deadline - begun.deadline == (300 if begun_anew else 0)


def test_a_night_that_was_killed_before_training_keeps_its_time_by_the_same_recipe_and_begins_anew_by_a_mended_one(
    recipe: Path,
    clock: FakeClock,  # noqa: F811
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("overnight.cli.run.prepare", killed)
    command, run = ["run", str(recipe), "--budget=8h"], config.load_run(str(recipe), ["budget=8h"])
    assert main(command) == 130
    begun = read_record(run)
    assert begun is not None
    clock.now += 7200
    capsys.readouterr()
    assert main(command) == 130
    assert "budget 8h: its time began at" in capsys.readouterr().out
    assert read_record(run) == begun
    assert main([*command, "--data.min_chars=7"]) == 130
    assert "budget 8h begins now (an earlier attempt with other settings stopped before training)" in capsys.readouterr().out
    record = read_record(run)
    assert record is not None and (record.started, record.deadline) == (begun.started + 7200, begun.deadline + 7200)


def test_the_plan_of_a_run_that_lies_elsewhere_finds_its_data_and_shows_what_was_decided(
    recipe: Path,
    tiny_data: Path,
    clock: FakeClock,  # noqa: F811
    capsys: Captured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_data, "prepared")
    assert main(["pretrain", str(recipe), "--budget=50s", "--data.dir=prepared"]) == 0
    shutil.copytree("run", "elsewhere/copy")
    monkeypatch.chdir("elsewhere")
    capsys.readouterr()
    assert main(["plan", "copy", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    record = read_record(config.stored_run(Path("copy")))
    assert record is not None and plan["prepared"] and plan["time"] is None
    assert {phase["name"]: phase["steps"] for phase in plan["phases"]} == {name: record.of(name)[-1].steps for name in ("short", "long")}
    assert main(["plan", "copy"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"as this run has decided so far: short {record.of('short')[-1].steps} steps, its rate decays from step" in said


def test_the_evaluation_at_the_end_is_estimated_by_the_text_there_is(
    tiny_data: Path, monkeypatch: pytest.MonkeyPatch, recipe: Path
) -> None:
    run = config.load_run(str(recipe), [f"data.dir={tiny_data}"])
    assert isinstance(run, config.BertRun)
    ticks = itertools.count()
    monkeypatch.setattr(rehearsal.time, "perf_counter", lambda: float(next(ticks)))
    tokens = load_manifest(tiny_data).count("valid", "tokens")
    assert tokens < rehearsal.MAX_TOKENS
    few = rehearsal.evaluation_seconds(run)
    monkeypatch.setattr(rehearsal, "MAX_TOKENS", tokens // 2)
    assert few == pytest.approx(2 * rehearsal.evaluation_seconds(run), rel=0.01), "of more tokens there are than are read, those that are"


def test_a_linear_probe_is_rehearsed_too(tmp_path: Path) -> None:
    table = tmp_path / "opinion.csv"
    table.write_text(
        "text,label\n" + "".join(f"a {word} object {i},{label}\n" for i in range(40) for word, label in (("good", 1), ("bad", 0)))
    )
    tree = tiny_tree(tmp_path, tmp_path)
    phase = {"steps": 6, "global_batch_size": 8, "seq_len": 32}
    tree |= {
        "model": {"kind": "mlstm", "num_layers": 1, "hidden_size": 16, "embedding_size": 8},
        "data": {"paths": [str(tmp_path)], "tokenizer": "bytes"},
        "phases": {"only": phase},
        "linear_probe": {"opinion": {"task": "csv", "path": str(table)}},
    }
    after = time_plan.seconds_after_pretraining(config.build_run(tree))
    assert list(after) == ["opinion", "export and report"] and 0 < after["opinion"] < 600


def test_plan_says_what_a_budget_comes_to_and_writes_nothing(recipe: Path, tiny_data: Path, capsys: Captured) -> None:
    command = ["plan", str(recipe), "--budget=8h", f"--data.dir={tiny_data}"]
    before = sorted(recipe.parent.rglob("*"))
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "budget 8h: begun now, it ends at" in out and "What follows is estimated at opinion" in out
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    steps = {phase["name"]: phase["steps"] for phase in plan["phases"]}
    assert plan["time"]["steps"] == steps and steps["short"] / steps["long"] == pytest.approx(1.5, rel=0.01) and steps["short"] > 10_000
    assert sorted(recipe.parent.rglob("*")) == before


def test_plan_says_where_a_budget_is_too_short_for_token_matching(tiny_data: Path, tmp_path: Path, capsys: Captured) -> None:
    for steps, said in ((10**6, True), (9, False)):
        tree: Any = {"name": "pairs", "data": {"paths": ["x"], "dir": str(tiny_data)}, "model": modern_settings()["model"]}
        phase = {"steps": 8, "global_batch_size": 8, "seq_len": 32, "nsp": False, "token_matching": 1.0, "token_matching_steps": steps}
        tree["phases"] = {"only": {**phase, "optim": {"schedule": SCHEDULE}}}
        (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(tree))
        assert main(["plan", str(tmp_path / "pairs.yaml"), "--budget=1h"]) == 0
        assert ("steps (too few for token matching)" in " ".join(capsys.readouterr().out.split())) == said


def test_plan_without_prepared_data_says_that_nothing_can_be_timed(recipe: Path, capsys: Captured) -> None:
    assert main(["plan", str(recipe), "--budget=8h", "--data.dir=nowhere"]) == 0
    assert "budget 8h: no step can be timed before the data is prepared" in " ".join(capsys.readouterr().out.split())
