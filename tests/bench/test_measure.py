"""Candidates take turns, quartiles are right, and a ratio above 1 always means that ours is better."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.bench import measure as measuring
from overnight.bench.measure import Row, Timing, measure, print_result, printed, rate_row, result, time_row
from overnight.cli.main import Terminated, main


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the candidates move."""
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    return now


def test_candidates_take_turns_after_the_warm_up(clock: list[float]) -> None:
    calls: list[str] = []

    def candidate(name: str, seconds: float) -> None:
        calls.append(name)
        clock[0] += seconds

    times = measure({"a": lambda: candidate("a", 1.0), "b": lambda: candidate("b", 3.0)}, warmup=1, repeats=3)
    assert calls == ["a", "b"] * 4
    assert times["a"].seconds == (1.0, 1.0, 1.0)
    assert times["b"].seconds == (3.0, 3.0, 3.0)


def test_the_device_is_waited_for_on_both_sides_of_the_clock(clock: list[float]) -> None:
    pending = [0.0]

    def launch() -> None:
        pending[0] += 2.0

    def sync() -> None:
        clock[0] += pending[0]
        pending[0] = 0.0

    # Without the first wait the warm-up's work, without the second none of it would be in the times.
    assert measure({"a": launch}, warmup=5, repeats=2, sync=sync)["a"].seconds == (2.0, 2.0)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_quartiles_lie_around_the_median_inside_the_range(seconds: list[float]) -> None:
    timing = Timing(tuple(seconds))
    low, high = timing.quartiles
    slack = 1e-9 * max(seconds)
    assert min(seconds) - slack <= low <= timing.median + slack
    assert timing.median - slack <= high <= max(seconds) + slack
    assert timing.median == statistics.median(seconds)


def test_quartiles_of_known_times() -> None:
    assert Timing((5.0, 1.0, 4.0, 2.0, 3.0)).quartiles == (2.0, 4.0)


FAST, SLOW = Timing((1.0, 2.0, 3.0)), Timing((4.0, 8.0, 12.0))


def test_a_ratio_above_1_means_ours_is_better_for_rates_times_and_memory() -> None:
    assert rate_row("x", "sequences/s", 32, FAST, "peer", SLOW).ratio == pytest.approx(4)
    assert time_row("x", FAST, "peer", SLOW).ratio == pytest.approx(4)
    assert time_row("x", SLOW, "peer", FAST).ratio == pytest.approx(1 / 4)
    assert Row("x", 2.0, "GB", peer="peer", peer_value=3.0).ratio == pytest.approx(1.5)
    assert Row("x", 0.6, "accuracy", peer="peer", peer_value=0.5).ratio == pytest.approx(1.2)
    assert Row("x", 2.0, "GB").ratio is None


def test_a_rate_is_the_amount_over_the_time_with_its_quartiles_in_order() -> None:
    row = rate_row("x", "sequences/s", 32, FAST)
    assert row.value == 16.0
    assert row.spread == (32 / 2.5, 32 / 1.5)


def test_a_unit_whose_better_direction_is_unknown_is_an_error_only_with_a_peer() -> None:
    assert Row("x", 1.0, "furlongs").to_dict()["value"] == 1.0
    with pytest.raises(AssertionError, match="furlongs"):
        Row("x", 1.0, "furlongs", peer="peer", peer_value=2.0).to_dict()


def test_the_last_line_printed_is_one_json_object_with_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    print("something before")
    print_result("train", [rate_row("bert 128", "sequences/s", 32, FAST, "peer", SLOW), Row("memory", 1.0, "GB")])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(found) == ["what", "environment", "rows"]
    assert found["what"] == "train"
    assert {"name", "value", "unit", "spread", "peer", "peer_value", "ratio"} <= set(found["rows"][0])
    assert set(found["rows"][1]) == {"name", "value", "unit", "spread"}
    assert found["rows"][0]["ratio"] == 4.0


def test_a_number_that_json_does_not_have_is_not_printed() -> None:
    with pytest.raises(ValueError):
        print_result("train", [Row("x", float("nan"), "s")])


def test_the_result_names_the_environment() -> None:
    assert result("x", [])["environment"]["python"]


def test_what_is_measured_before_an_interruption_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), printed("x") as rows:
        rows.append(Row("a", 1.0, "s"))
        raise KeyboardInterrupt
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["a"]
    with pytest.raises(KeyboardInterrupt), printed("x"):
        raise KeyboardInterrupt
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (Terminated(15), 143)])
def test_an_interrupted_benchmark_is_not_said_to_continue(
    stop: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_case(*args: object, **kwargs: object) -> None:
        raise stop

    monkeypatch.setattr("overnight.bench.optim.measure_case", measure_case)
    assert main(["bench", "optim", "--tiny"]) == code
    assert "; the same command begins anew" in capsys.readouterr().err
