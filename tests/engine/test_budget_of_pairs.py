"""A budget counts what the pairs of token matching take, and leaves them out of a phase that is too short for them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overnight.config import Run
from overnight.engine import planner
from overnight.models.flops import training_flops
from tests.conftest import modern_settings
from tests.engine.fake_clock import FakeClock
from tests.engine.test_planner import LESS, WSD, clock, events, record_of, replayed, samples_of, train
from tests.engine.test_pretrain import Stop, assert_same_run, metrics

__all__ = ["clock"]
Make = Callable[..., Run]
PAIRS = {"phases.short.token_matching": 1.0, "phases.short.token_matching_steps": 100, "phases.short.final_token_matching": 0.5}


def half_as_long(**more: Any) -> dict[str, Any]:
    """Sequences that are half as long as they may be on average, and their pairs half as long again, for the first 40 steps."""
    pairs = {"token_matching": 1.0, "token_matching_steps": 40, "short_seq_prob": 1.0, "global_batch_size": 32, "micro_batch_size": 32}
    return {**modern_settings(), **WSD, **LESS, **{f"phases.short.{key}": value for key, value in pairs.items()}, **more}


def test_pairs_count_by_how_much_more_work_they_are(tiny: Make) -> None:
    run = tiny(**half_as_long())
    share, samples = planner.shares(run)[0], samples_of(run)

    def work(first: int, last: int) -> float:
        return sum(training_flops(run.model, run.data.vocab_size, samples.step(step).sizes) for step in range(first, last))

    assert share.work(80) - share.work(40) == pytest.approx(40)
    assert share.work(40) / 40 == pytest.approx(work(0, 40) / work(40, 80), rel=0.05) and share.work(40) > 1.2 * 40


def test_a_run_knows_while_it_learns_pairs_how_many_steps_it_will_have(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**half_as_long(**{"budget": "100s", "phases.short.token_matching_steps": 20}))
    run = dataclasses.replace(run, phases={"short": run.phases["short"]})
    longer = planner.shares(run)[0].work(20) / 20
    clock.slow = {step: longer for step in range(1, 21)}
    train(run)
    first, *_, last = record_of(run).of("short")[1:]
    assert first.at < 20 and first.steps == pytest.approx(last.steps, rel=0.03)


def test_a_phase_that_its_budget_makes_too_short_leaves_token_matching_out_and_says_so(
    tiny: Make, clock: FakeClock, tmp_path: Path
) -> None:
    settings = {**modern_settings(), **WSD, **LESS, **PAIRS, "logging.log_every": 1}
    run = tiny(**settings, budget="50s", out=str(tmp_path / "first"))
    clock.stop_at = 4  # before the decision, which is obeyed again after the first one was lost
    with pytest.raises(Stop):
        train(run)
    clock.stop_at = 32
    with pytest.raises(Stop):
        train(run)
    clock.stop_at = -1
    train(run)
    decided = record_of(run).of("short")[1]
    assert 0 < decided.at < decided.steps < 4 * 100
    lines = [line for line in metrics(run) if line["kind"] == "train" and line["phase"] == "short"]
    assert {line["step"] for line in lines if "match_loss" in line} == set(range(1, decided.at + 1))
    (said,) = {event["message"] for event in events(run) if event["event"] == "token_matching"}
    assert said.startswith(
        f"with its pairs phase short would get about {decided.steps} steps: too few for token matching, which takes the first 100 (token_matching_steps)"
    )
    assert_same_run(run, replayed(run, tiny(**settings, budget="50s", out=str(tmp_path / "again"))))


def test_a_phase_that_leaves_pairs_out_is_said_to_get_one_number_of_steps(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**half_as_long(budget="100s"))
    said = train(run)
    expected, shown = (re.search(pattern, said) for pattern in (r": short about (\d+) steps of", r"phase short: (\d+) steps"))
    assert expected and shown and expected[1] == shown[1], said
    assert int(shown[1]) > record_of(run).of("short")[1].steps


def test_what_a_budget_left_out_is_not_said_to_be_unlearned(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**modern_settings(), **WSD, **LESS, **PAIRS, **{"logging.log_every": 1000}, budget="50s")
    train(run)
    (said,) = [event["message"] for event in events(run) if event["event"] == "token_matching"]
    assert "too few for token matching" in said
    assert any("match_loss" in line for line in metrics(run))


def test_a_phase_that_is_long_enough_keeps_token_matching(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**modern_settings(), **WSD, **LESS, **{**PAIRS, "phases.short.token_matching_steps": 4}, budget="50s")
    assert "too few for token matching" not in train(run)
    assert all("match_loss" in line for line in metrics(run) if line["kind"] == "train" and line["phase"] == "short")


def test_steps_that_compile_are_not_the_speed_by_which_pairs_are_left_out(tiny: Make, clock: FakeClock) -> None:
    # As on an H100, where several of the first steps compiled, and 1,562 steps were expected of a phase that came to 3,158.
    run = tiny(**half_as_long(budget="260s"))
    clock.slow, clock.stop_at = {1: 6.0, 2: 4.0, 4: 3.0, 5: 3.0, 6: 3.0}, 14
    with pytest.raises(Stop):
        train(run)
    (decided,) = record_of(run).of("short")[1:]
    assert decided.seconds_per_step < 1.5 and decided.steps >= 4 * 40
    assert not [event for event in events(run) if event["event"] == "token_matching"]
