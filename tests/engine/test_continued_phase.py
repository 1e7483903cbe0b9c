"""A phase that continues another has its optimizer and the rest of its schedule: the decay crosses into it without a jump, under a budget too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from overnight import config
from overnight.cli.main import main
from overnight.config import BertPhase, LambConfig, Phase, Run, Schedule
from overnight.config.continued import with_steps
from overnight.engine import planner
from overnight.optim.decisions import Decision, decided_decay, decided_factor
from overnight.optim.schedules import decay_factors, factor, stretch
from tests.conftest import modern_settings
from tests.engine.fake_clock import FakeClock
from tests.engine.test_planner import LESS, clock, events, record_of, replayed, train
from tests.engine.test_pretrain import Stop, assert_same_run, metrics
from tests.recipe import change, message, tree

__all__ = ["clock"]
Make = Callable[..., Run]
# Three of ten steps are before the decay, and three of it before the second phase.
SHARED = {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.2}
LONG = {"steps": 4, "global_batch_size": 8, "seq_len": 48, "micro_batch_size": 8, "max_predictions_per_seq": 5, "continues": True}
TWO: dict[str, Any] = {"phases.long": LONG, "phases.short.optim.schedule": SHARED}


def phase(steps: int, **schedule: Any) -> BertPhase:
    return BertPhase(steps=steps, global_batch_size=8, optim=LambConfig(lr=1.0, schedule=Schedule("wsd", **schedule)))


@pytest.mark.parametrize("form", [{}, {"power": 2.0}, {"decay": "sqrt"}])
@given(warmup=st.integers(0, 9), stable=st.integers(0, 20), decay=st.integers(2, 40), data=st.data())
def test_decisions_that_change_nothing_give_the_shared_schedule_of_the_recipe(
    form: dict[str, Any], warmup: int, stable: int, decay: int, data: st.DataObject
) -> None:
    total = warmup + stable + decay
    first = data.draw(st.integers(max(1, warmup), total - 1))
    ratios = {"warmup_ratio": warmup / total, "stable_ratio": stable / total, "total_steps": total, **form}
    for one in (phase(first, **ratios), phase(total - first, **ratios, step_offset=first)):
        part = stretch(one)
        warm, falls = round(part.warmup * one.steps), one.steps - round(part.decay * one.steps)
        assume(falls >= warm)
        decided = [Decision("short", 0, warm, falls, one.steps, "", "", 0.0)]
        steps, schedule = range(one.steps), one.optim.schedule
        wanted = pytest.approx([factor(schedule, step, one.steps) for step in steps], rel=1e-9, abs=2e-7)
        assert [decided_factor(schedule, decided, step, part.ends) for step in steps] == wanted
        falling = pytest.approx([decay_factors(one)(step) for step in steps], rel=1e-9, abs=2e-7)
        assert [decided_decay(schedule, decided, step, part.ends) for step in steps] == falling


def test_a_phase_with_a_schedule_of_its_own_has_all_of_it() -> None:
    alone = stretch(phase(50, warmup_ratio=0.1, stable_ratio=0.5))
    assert alone == (0.1, 1.0 - 0.1 - 0.5, (1.0, 0.0))
    assert stretch(phase(50, warmup_ratio=0.1, stable_ratio=0.5, total_steps=50)) == alone
    assert stretch(phase(50, warmup_ratio=0.1, stable_ratio=0.5, total_steps=100)) == (0.2, 0.0, (1.0, 1.0)), "before the decay"


def parts(phases: Mapping[str, Phase]) -> list[tuple[int, int, int]]:
    return [(p.steps, p.optim.schedule.total_steps, p.optim.schedule.step_offset) for p in phases.values()]


def test_a_phase_that_continues_one_has_its_optimizer_its_moments_and_the_rest_of_its_schedule(tiny: Make) -> None:
    more = {"phases.last": {**LONG, "steps": 3}, "phases.short.optim.lr": 0.02}
    run = tiny(**TWO, **more)
    assert parts(run.phases) == [(6, 13, 0), (4, 13, 6), (3, 13, 10)]
    short, *others = run.phases.values()
    assert short.optim.reset_moments and not any(other.optim.reset_moments for other in others)
    schedule = {"total_steps": 0, "step_offset": 0}
    alike = {replace(p.optim, reset_moments=True, schedule=replace(p.optim.schedule, **schedule)) for p in run.phases.values()}
    assert len(alike) == 1 and short.optim.lr == 0.02
    written = config.to_tree(run)
    assert "optim" not in written["phases"]["long"] and "total_steps" not in written["phases"]["short"]["optim"]["schedule"]
    assert config.build_run(written) == run
    written["phases"]["short"]["steps"] = 100
    assert parts(config.build_run(written).phases) == [(100, 107, 0), (4, 107, 100), (3, 107, 104)]
    assert parts(with_steps(run.phases, {"short": 20, "long": 9, "last": 1})) == [(20, 30, 0), (9, 30, 20), (1, 30, 29)]


def test_the_steps_of_a_recipe_take_the_rates_of_one_schedule_through_both_phases(tiny: Make, tmp_path: Path) -> None:
    run = tiny(**TWO, out=str(tmp_path / "two"))
    told = train(run)
    assert re.search(r"phase short: .* lamb at 0\.01, ", told) and re.search(r"phase long: .* lamb continued, ", told)
    whole = Schedule("wsd", warmup_ratio=0.1, stable_ratio=0.2)
    assert rates(run) == pytest.approx([0.01 * factor(whole, step, 10) for step in range(10)])


def rates(run: Run) -> list[float]:
    return [line["lr"] for line in metrics(run) if line["kind"] == "train"]


def test_the_rate_of_a_budget_falls_through_both_phases_to_0_without_a_jump(tiny: Make, clock: FakeClock, tmp_path: Path) -> None:
    run = tiny(**TWO, **LESS, budget="80s", out=str(tmp_path / "first"))
    train(run)
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 2
    short, long = (record.of(name)[-1] for name in ("short", "long"))
    assert short.decay_begins is not None and long.decay_begins is not None
    values, boundary = rates(run), short.steps
    assert len(values) == short.steps + long.steps and long.steps > 12
    falling = values[short.decay_begins :]
    assert all(a >= b for a, b in pairwise(falling)) and max(values) == 0.01
    steepest = max(a - b for a, b in pairwise(falling))
    assert steepest < 0.01 / 15
    # Of the seven tenths that decay, the second phase has four.
    assert values[boundary] == pytest.approx(0.01 * 4 / 7) and values[boundary - 1] - values[boundary] <= steepest
    assert 0 < values[-1] <= 2 * steepest
    assert_same_run(run, replayed(run, tiny(**TWO, **LESS, budget="80s", out=str(tmp_path / "again"))))


def test_a_decay_that_had_to_begin_before_its_warm_up_was_over_does_not_rise_in_the_next_phase(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**{**TWO, "phases.short.optim.schedule": {**SHARED, "stable_ratio": 0.0}}, **LESS, budget="80s")
    train(run)
    short, values = record_of(run).of("short"), rates(run)
    begins = short[-1].decay_begins
    assert begins is not None and begins < short[-1].warmup_steps and max(values) < 0.005
    assert all(a >= b for a, b in pairwise(values[begins:])) and values[short[-1].steps] == pytest.approx(max(values) * 4 / 9)


@pytest.mark.parametrize("killed", [45, *(pytest.param(killed, marks=pytest.mark.heavy) for killed in (20, 55))])
def test_killed_in_either_phase_it_has_the_bits_of_its_decisions(killed: int, tiny: Make, clock: FakeClock, tmp_path: Path) -> None:
    run = tiny(**TWO, **LESS, budget="60s", out=str(tmp_path / "first"))
    clock.stop_at = killed
    with pytest.raises(Stop):
        train(run)
    clock.stop_at, clock.step_seconds = -1, 0.7
    train(run)
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 2
    assert_same_run(run, replayed(run, tiny(**TWO, **LESS, budget="60s", out=str(tmp_path / "again"))))


def test_more_time_goes_back_before_the_shared_decay_and_trains_both_phases(
    tiny: Make, clock: FakeClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = {**TWO, "phases.short.optim.schedule": {**SHARED, "stable_ratio": 0.4}}
    run = tiny(**two, **LESS, budget="60s", out=str(tmp_path / "night"))
    train(run)
    before = record_of(run).of("long")[-1].steps
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(config.run_yaml(run))
    assert main(["pretrain", str(recipe), "--budget=90s", "--extend"]) == 0
    assert "goes back from step" in capsys.readouterr().out
    record, values = record_of(run), rates(run)
    assert record.of("long")[-1].steps > before and (run.run_dir / "before-1").is_dir()
    begins = record.of("short")[-1].decay_begins
    assert begins is not None and all(a >= b for a, b in pairwise(values[begins:])) and 0 < values[-1] < 0.002


def test_a_phase_behind_one_that_is_too_short_for_pairs_makes_none_either(tiny: Make, clock: FakeClock, tmp_path: Path) -> None:
    pairs = {
        "phases.short.token_matching": 1.0,
        "phases.short.token_matching_steps": 100,
        "phases.short.final_token_matching": 0.5,
        "phases.long.token_matching": 0.5,
    }
    settings = {**TWO, **modern_settings(), **LESS, **pairs, "logging.log_every": 1}
    run = tiny(**settings, budget="50s", out=str(tmp_path / "first"))
    train(run)
    lines = [line for line in metrics(run) if line["kind"] == "train"]
    assert any("match_loss" in line for line in lines if line["phase"] == "short")
    assert not any("match_loss" in line for line in lines if line["phase"] == "long")
    assert [event["phase"] for event in events(run) if event["event"] == "token_matching"] == ["short"]
    assert_same_run(run, replayed(run, tiny(**settings, budget="50s", out=str(tmp_path / "again"))))
    # Without a first phase that leaves them out it keeps its pairs.
    long_enough = replace(run, phases={"long": run.phases["long"]})
    assert planner.pairs_end(record_of(run), long_enough.phases) == {}


def refused(**changes: Any) -> str:
    found = tree()
    found["phases"]["short"]["optim"] = {"name": "lamb", "schedule": {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.5}}
    found["phases"]["long"] = {"steps": 100, "global_batch_size": 64, "continues": True}
    return message(lambda: config.build_run(change(found, {key.replace("__", "."): value for key, value in changes.items()})))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "phases__long__optim",
            {"name": "lamb"},
            "phases.long.optim: phases.long.continues = true takes that of short; leave one of the two out",
        ),
        ("phases__short__continues", True, "phases.short.continues = true: there is no phase before; leave it out"),
        (
            "phases__short__optim__schedule__total_steps",
            200,
            "phases.short.optim.schedule.total_steps = 200: follows from the steps of the phases, since long continues this one; leave it out",
        ),
        (
            "phases__short__optim__schedule",
            {"name": "wsd", "warmup_ratio": 0.6, "stable_ratio": 0.1},
            "phases.short.optim.schedule.warmup_ratio = 0.6: of the steps of all phases that continue this one the warm-up is longer than it",
        ),
        (
            "phases__short__optim__scaling",
            {"rule": "sqrt", "base_batch_size": 32},
            "phases.long.continues = true: needs the batch of short, 64, since its rate follows the batch (optim.scaling.rule = sqrt)",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_with_what_to_do(key: str, value: Any, said: str) -> None:
    changes = {key: value} if "scaling" not in key else {key: value, "phases__long__global_batch_size": 32}
    assert said in refused(**changes)
