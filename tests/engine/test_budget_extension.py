"""A run that is given more time continues from before its decay, keeps what it was, and survives a kill at any moment."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overnight.checkpoint.reader import list_checkpoints, step_of
from overnight.config import Run
from overnight.console import Line
from overnight.engine import budget_extension
from overnight.engine.pretrain import pretrain
from overnight.errors import ConfigError, DataError
from tests.conftest import tiny_run
from tests.engine.fake_clock import FakeClock
from tests.engine.test_planner import LESS, WSD, clock, events, machine, record_of, replayed, train
from tests.engine.test_pretrain import Stop, assert_same_run, metrics, parameters

__all__ = ["clock"]
Make = Callable[..., Run]


def one(tiny: Make, budget: str, **more: Any) -> Run:
    """A run of one phase."""
    run = tiny(**WSD, **LESS | {"logging.log_every": 1, "logging.eval_every": 1000, "budget": budget, **more})
    return dataclasses.replace(run, phases={"short": run.phases["short"]})


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, float]:
    """A run of a minute that is done, and the time of its clock."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        ticking = machine(patch)
        train(run := one(lambda **overrides: tiny_run(folder, tiny_data, overrides), "60s"))
        return run, ticking.now


@pytest.fixture
def ended(trained: tuple[Run, float], tiny: Make, clock: FakeClock) -> Run:
    """A copy of it, where the run of `tiny` lies, when it has just ended."""
    run = one(tiny, "60s")
    shutil.copytree(trained[0].run_dir, run.run_dir)
    clock.now = trained[1]
    return run


def extended(run: Run) -> str:
    out = io.StringIO()
    pretrain(run, Line(out), extend=True)
    return out.getvalue()


def steps(folder: Path) -> list[int]:
    return sorted(step_of(checkpoint) or 0 for checkpoint in list_checkpoints(folder))


def test_the_newest_checkpoint_from_before_the_decay_is_kept(trained: tuple[Run, float]) -> None:
    run, _ = trained
    decay = record_of(run).first_decay("short")
    assert decay is not None
    kept = steps(run.run_dir / "checkpoints")
    assert len(kept) == 3 and kept[0] <= decay < kept[0] + 5 and kept[1] > decay + 10, "two of the newest as always, and that one"


@pytest.mark.parametrize("budget", ["110s", pytest.param("200s", marks=pytest.mark.heavy)])
def test_a_checkpoint_is_written_shortly_before_the_decay_whatever_the_steps_between_others(
    tiny: Make, clock: FakeClock, budget: str
) -> None:
    rare = {"checkpoint.save_every": 100_000}
    run = one(tiny, budget, **rare)
    train(run)
    decay = record_of(run).first_decay("short")
    first, last = steps(run.run_dir / "checkpoints")
    assert decay is not None and decay - 6 <= first <= decay < last
    assert "goes back" in extended(one(tiny, "20s", **rare))


def test_with_more_time_it_goes_on_at_its_full_rate_and_ends_in_time(ended: Run, tiny: Make, clock: FakeClock, tmp_path: Path) -> None:
    run = ended
    first, before = record_of(run), parameters(run)
    last, text = steps(run.run_dir / "checkpoints")[-1], (run.run_dir / "metrics.jsonl").read_bytes()
    clock.now += 1000  # the next evening
    longer = one(tiny, "90s")
    said = extended(longer)
    record, back = record_of(longer), steps(longer.run_dir / "checkpoints")
    assert f"the run goes back from step {last} to step" in said and f"its earlier state is in {run.run_dir / 'before-1'}" in said
    assert (record.extended, record.budget, record.decisions[:2]) == (1, "90s", first.decisions[:2])
    assert record.done is not None and abs(record.done - record.deadline) <= 2.0 and record.deadline - record.started == 90
    decay = record.first_decay("short")
    assert decay is not None and decay > last and back[-1] > last + 40
    rates = {line["step"]: line["lr"] for line in metrics(longer) if line["kind"] == "train"}
    assert len({rates[step] for step in range(20, decay)}) == 1, "the decay of before is undone"
    aside = run.run_dir / "before-1"
    assert steps(aside) == [last] and json.loads((aside / "budget.json").read_text())["budget"] == "60s"
    assert (aside / "metrics.jsonl").read_bytes() == text
    assert before.keys() == parameters(longer).keys()
    assert_same_run(longer, replayed(longer, one(tiny, "90s", out=str(tmp_path / "again"))))


@pytest.mark.usefixtures("ended")
def test_the_same_command_continues_and_a_run_that_is_done_gets_more_time_again(tiny: Make, clock: FakeClock) -> None:
    longer = one(tiny, "40s")
    clock.stop_at = clock.steps + 20
    with pytest.raises(Stop):
        extended(longer)
    begun = record_of(longer)
    clock.stop_at = -1
    assert "40s: " in (said := extended(longer)) and "goes back" not in said
    assert "has this budget and is not done: it only continues, until " in said
    assert (record_of(longer).deadline, record_of(longer).extended) == (begun.deadline, 1)
    assert "all phases are done" in train(longer)
    assert "goes back" in extended(longer)
    assert record_of(longer).extended == 2 and len(steps(longer.run_dir / "before-2")) == 1
    # The second is of the same length as the first, and in the metrics all the same.
    told = [(event["was"], event["message"]) for event in events(longer) if event["event"] == "extended"]
    assert told == [(f"before-{number}", "extended: budget 40s from here on, in place of the decay") for number in (1, 2)]


def test_killed_before_the_record_is_written_it_is_the_run_from_before(
    ended: Run, tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, longer = ended, one(tiny, "40s")
    shutil.copytree(run.run_dir, tmp_path / "as it was")

    def stop(*args: object) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(budget_extension, "write_record", stop)
        with pytest.raises(Stop):
            extended(longer)
    assert len(steps(run.run_dir / "checkpoints")) == 1
    train(run)
    assert_same_run(run, one(tiny, "60s", out=str(tmp_path / "as it was")))
    assert "goes back" in extended(longer) and record_of(longer).extended == 1


def test_of_two_phases_it_goes_back_into_the_first_and_both_become_longer(tiny: Make, clock: FakeClock) -> None:
    run, longer = tiny(**WSD, **LESS, budget="40s"), tiny(**WSD, **LESS, budget="60s")
    train(run)
    before = {name: record_of(run).of(name)[-1].steps for name in ("short", "long")}
    extended(longer)
    assert all(record_of(longer).of(name)[-1].steps > 1.4 * steps for name, steps in before.items())


def test_what_cannot_be_extended_says_why_and_stays_as_it_is(ended: Run, tiny: Make) -> None:
    run = ended
    longer, record = one(tiny, "90s"), record_of(run)
    with pytest.raises(ConfigError, match=r"holds another run:\n  seed"):
        extended(one(tiny, "90s", seed=7))
    with pytest.raises(ConfigError, match=r"was begun with budget = '60s'.*add --extend to give it so much more time"):
        train(longer)
    oldest = list_checkpoints(run.run_dir / "checkpoints")[-1]
    (oldest / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(DataError, match="put it back"):
        extended(longer)
    shutil.rmtree(oldest)
    with pytest.raises(DataError, match=r"has no checkpoint from before its decay, which began at step .*--init="):
        extended(longer)
    assert record_of(run) == record and len(steps(run.run_dir / "checkpoints")) == 2 and not (run.run_dir / "before-1").exists()
    assert "all phases are done" in train(run)


def test_a_new_run_with_extend_is_a_new_run_that_the_same_command_continues(tiny: Make, clock: FakeClock) -> None:
    run = one(tiny, "40s")
    clock.stop_at = 33  # in its decay
    with pytest.raises(Stop):
        extended(run)
    deadline, clock.stop_at = record_of(run).deadline, -1
    assert "goes back" not in extended(run) and (record_of(run).extended, record_of(run).deadline) == (0, deadline)


def test_one_that_was_stopped_before_its_speed_was_measured_is_extended_too(tiny: Make, clock: FakeClock, tmp_path: Path) -> None:
    changes = {"checkpoint.save_every": 2}
    clock.stop_at = 4
    with pytest.raises(Stop):
        train(one(tiny, "40s", **changes))
    longer, clock.stop_at = one(tiny, "60s", **changes), -1
    assert len(record_of(longer).decisions) == 1 and steps(longer.run_dir / "checkpoints") == [2]
    assert "budget 60s: the run continues until" in extended(longer)
    record = record_of(longer)
    assert record.done is not None and abs(record.done - record.deadline) <= 2.0 and record.of("short")[-1].steps > 50
    assert_same_run(longer, replayed(longer, one(tiny, "60s", **changes, out=str(tmp_path / "again"))))


@pytest.mark.parametrize(("stopped", "said"), [(33, "the run goes back from step 30 to step"), (12, "the run continues until")])
def test_the_same_budget_gives_a_run_that_was_stopped_until_past_its_deadline_as_much_time_again(
    tiny: Make, clock: FakeClock, stopped: int, said: str
) -> None:
    run = one(tiny, "40s")
    clock.stop_at = stopped
    with pytest.raises(Stop):
        train(run)
    assert (record_of(run).first_decay("short") is not None) == (stopped == 33)
    clock.stop_at, clock.now = -1, clock.now + 3600
    assert said in extended(run)
    record = record_of(run)
    assert record.extended == 1 and record.deadline - record.started == 40
    assert record.done is not None and abs(record.done - record.deadline) <= 2.0 and record.of("short")[-1].steps > stopped + 25


def test_one_without_a_checkpoint_is_not_extended_but_may_begin_anew(tiny: Make, clock: FakeClock) -> None:
    run = one(tiny, "40s")
    clock.stop_at = 3
    with pytest.raises(Stop):
        train(run)
    clock.stop_at, clock.now = -1, clock.now + 3600
    with pytest.raises(DataError, match=r"has no checkpoint; delete .*budget\.json to begin the run and its time anew"):
        extended(run)
    (run.run_dir / "budget.json").unlink()
    extended(run)
    assert record_of(run).extended == 0 and record_of(run).of("short")[-1].steps > 30
