"""Schedules: shape, continuity, and the counting of the references."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight.config import Schedule
from overnight.optim.schedules import factor

NAMES = ["poly", "poly_nvidia", "cosine", "constant"]


def curve(steps: int, **settings: Any) -> list[float]:
    schedule = Schedule(**settings)
    return [factor(schedule, step, steps) for step in range(steps)]


@given(st.sampled_from(NAMES), st.integers(1, 3000), st.floats(0, 1), st.floats(0.1, 4), st.data())
def test_a_factor_is_between_0_and_1_and_the_first_above_0(name: Any, steps: int, warmup: float, power: float, data: st.DataObject) -> None:
    schedule = Schedule(name=name, warmup=warmup, power=power)
    step = data.draw(st.integers(0, steps - 1))
    assert 0 <= factor(schedule, step, steps) <= 1
    # NVIDIA's last update does nothing, also where it is the only one.
    if steps > 1 or name != "poly_nvidia" or warmup > 1e-9:
        assert factor(schedule, 0, max(steps, 2)) > 0


@given(st.sampled_from(["poly", "cosine"]), st.integers(2, 500), st.floats(0, 0.9), st.floats(1, 3))
def test_it_rises_to_one_peak_and_falls_without_a_jump(name: Any, steps: int, warmup: float, power: float) -> None:
    values = curve(steps, name=name, warmup=warmup, power=power)
    top = values.index(max(values))
    assert all(a <= b for a, b in pairwise(values[: top + 1]))
    assert all(a >= b for a, b in pairwise(values[top:]))
    up = 1 / max(1.0, warmup * steps)
    down = 1 - (1 - 1 / max(1.0, (1 - warmup) * steps)) ** power if name == "poly" else math.pi / 2 / max(1.0, (1 - warmup) * steps)
    assert max(abs(a - b) for a, b in pairwise(values)) <= max(up, down) + 1e-9
    assert max(values) >= 1 - up


@pytest.mark.parametrize(("warmup", "steps"), [(0.1, 100), (0.0, 10), (0.25, 8), (1.0, 10)])
def test_poly_of_power_1_is_a_line_up_and_a_line_down(warmup: float, steps: int) -> None:
    w = round(warmup * steps)
    expected = [(t + 1) / w for t in range(w)] + [(steps - t) / (steps - w) for t in range(w, steps)]
    assert curve(steps, warmup=warmup) == pytest.approx(expected)


def test_constant_stays_at_the_peak_after_its_warm_up() -> None:
    assert curve(10, name="constant", warmup=0.4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1])


def test_cosine_is_half_way_in_the_middle() -> None:
    values = curve(101, name="cosine", warmup=1 / 101)
    assert values[0] == values[1] == 1 and values[51] == pytest.approx(0.5)


def test_poly_nvidia_jumps_from_6e_3_to_5_08e_3_at_the_end_of_nvlambs_warm_up() -> None:
    rates = [6e-3 * value for value in curve(7038, name="poly_nvidia", warmup=0.2843, power=0.5)]
    assert f"{max(rates):.3e}" == "5.997e-03" and rates.index(max(rates)) == 1999
    assert f"{rates[2000]:.2e}" == "5.08e-03" and rates[-1] == 0


@pytest.mark.parametrize(("steps", "warmup"), [(7038, 0.2843), (1563, 0.128), (10, 0.3), (1, 0.1)])
def test_poly_nvidia_is_polywarmupscheduler_update_by_update(steps: int, warmup: float) -> None:
    # Its rule: last_epoch is the number of the coming update, from 1; progress = last_epoch / total_steps.
    expected = []
    for last_epoch in range(1, steps + 1):
        progress = last_epoch / steps
        expected.append(progress / warmup if progress < warmup else (1.0 - progress) ** 0.5)
    assert curve(steps, name="poly_nvidia", warmup=warmup, power=0.5) == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "w"), [(100, 10), (1000, 10), (20, 5)])
def test_poly_is_transformers_linear_schedule_with_the_warm_up_one_update_ahead(steps: int, w: int) -> None:
    transformers = pytest.importorskip("transformers")
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, w, steps)
    theirs = []
    for _ in range(steps):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    ours = curve(steps, warmup=w / steps)
    assert ours[:w] == pytest.approx(theirs[1 : w + 1]) and ours[w:] == pytest.approx(theirs[w:])


@given(st.sampled_from(NAMES), st.integers(1, 200), st.integers(1, 200), st.floats(0, 1), st.floats(0.5, 2))
def test_one_schedule_over_two_phases_is_that_of_one_phase(name: Any, first: int, second: int, warmup: float, power: float) -> None:
    total = first + second
    whole = curve(total, name=name, warmup=warmup, power=power)
    a = curve(first, name=name, warmup=warmup, power=power, total=total)
    b = curve(second, name=name, warmup=warmup, power=power, total=total, offset=first)
    assert a + b == whole
