"""Schedules: shape, continuity, and the counting of the references; the rules that derive the peak from the batch."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight import config
from overnight.config import BatchWarmup, BertPhase, LambConfig, Scaling, Schedule
from overnight.config.optimizers import SCHEDULE_SETTINGS
from overnight.optim.schedules import factor, learning_rate, peak_lr, resolved
from tests.recipe import message, tree

DECAYS = ["linear", "poly", "wsd", "cosine"]
LONG = "linear over 100,000 steps"
"""The schedule of Puri et al. 2018, without a warm-up: the phase ends long before it does."""
NAMES = [*DECAYS, "poly_nvidia", "constant", LONG]


def schedules(name: str, warmup_ratio: float, stable: float, power: float) -> Schedule:
    """A schedule with those of the settings that it has; `stable` is a share of what the warm-up leaves."""
    if name == LONG:
        return Schedule(name="linear", warmup_ratio=0.0, total_steps=100_000)
    settings = {
        "warmup_ratio": warmup_ratio,
        "power": power,
        "stable_ratio": stable * (1 - warmup_ratio),
        "decay": "power",
        "max_warmup_steps": 0,
    }
    return Schedule(name=name, **{key: settings[key] for key in SCHEDULE_SETTINGS[name]})  # type: ignore[arg-type]


def curve(steps: int, **settings: Any) -> list[float]:
    schedule = Schedule(**settings)
    return [factor(schedule, step, steps) for step in range(steps)]


@given(st.sampled_from(NAMES), st.integers(1, 3000), st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 4), st.data())
def test_a_factor_is_between_0_and_1_and_the_first_above_0(
    name: str, steps: int, warmup_ratio: float, stable: float, power: float, data: st.DataObject
) -> None:
    schedule = schedules(name, warmup_ratio, stable, power)
    assert 0 <= factor(schedule, data.draw(st.integers(0, steps - 1)), steps) <= 1
    # NVIDIA's last update does nothing, also where it is the only one.
    if steps > 1 or name != "poly_nvidia" or warmup_ratio > 1e-9:
        assert factor(schedule, 0, max(steps, 2)) > 0


@given(st.sampled_from([*DECAYS, "constant", LONG]), st.integers(2, 500), st.floats(0, 0.9), st.floats(0, 0.9), st.floats(1, 3))
def test_it_rises_to_one_peak_and_falls_without_a_jump(name: str, steps: int, warmup_ratio: float, stable: float, power: float) -> None:
    schedule = schedules(name, warmup_ratio, stable, power)
    values = [factor(schedule, step, steps) for step in range(steps)]
    top = values.index(max(values))
    assert all(a <= b for a, b in pairwise(values[: top + 1]))
    assert all(a >= b for a, b in pairwise(values[top:]))
    up = 1 / max(1.0, schedule.warmup_ratio * steps)
    rest = max(1.0, (1 - schedule.warmup_ratio - schedule.stable_ratio) * steps)
    down = math.pi / 2 / rest if name == "cosine" else 1 - (1 - 1 / rest) ** schedule.power
    assert max(abs(a - b) for a, b in pairwise(values)) <= max(up, down) + 1e-9
    assert max(values) >= 1 - up
    # The update after the last would have factor 0.
    assert name in ("constant", LONG) or values[-1] <= down + 1e-9


@pytest.mark.parametrize("name", ["linear", "poly"])
@pytest.mark.parametrize(("warmup_ratio", "steps"), [(0.1, 100), (0.0, 10), (0.25, 8), (1.0, 10)])
def test_linear_and_poly_of_power_1_are_a_line_up_and_a_line_down(name: str, warmup_ratio: float, steps: int) -> None:
    w = round(warmup_ratio * steps)
    expected = [(t + 1) / w for t in range(w)] + [(steps - t) / (steps - w) for t in range(w, steps)]
    assert curve(steps, name=name, warmup_ratio=warmup_ratio) == pytest.approx(expected)


@pytest.mark.parametrize("name", list(SCHEDULE_SETTINGS))
def test_a_setting_that_only_another_shape_has_does_nothing(name: str) -> None:
    """A recipe refuses it; in one's own loop nothing looks."""
    foreign: dict[str, Any] = {"stable_ratio": 0.3, "power": 2.0, "decay": "sqrt"}
    foreign = {key: value for key, value in foreign.items() if key not in SCHEDULE_SETTINGS[name]}
    assert curve(40, name=name, **foreign) == curve(40, name=name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"name": "cosin"}, "schedule.name = 'cosin': must be one of linear, poly, poly_nvidia, wsd, cosine, constant"),
        ({"name": "wsd", "decay": "sqr"}, "schedule.decay = 'sqr': must be one of power, sqrt"),
        ({"warmup_ratio": 1.5}, "schedule.warmup_ratio = 1.5: longer than the phase; it is a share of the steps, 0 to 1"),
        ({"warmup_ratio": math.nan}, "schedule.warmup_ratio = nan: longer than the phase; it is a share of the steps, 0 to 1"),
        (
            {"name": "wsd", "warmup_ratio": 0.6, "stable_ratio": 0.6},
            "schedule.stable_ratio = 0.6: must be 0 to 0.4, what the warm-up leaves",
        ),
        ({"power": 0.0}, "schedule.power = 0.0: must be above 0 and finite"),
        ({"warmup_ratio": "x"}, "schedule.warmup_ratio = x: must be a number"),
        ({"name": "linear", "total_steps": -1}, "schedule.total_steps = -1: must be 1 or more"),
    ],
)
def test_a_schedule_of_ones_own_loop_is_checked_as_a_recipes_is(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        factor(Schedule(**settings), 0, 1000)


def test_a_schedule_of_no_steps_has_no_factor() -> None:
    with pytest.raises(ValueError, match=r"^steps = 0: must be 1 or more$"):
        factor(Schedule("linear"), 0, 0)


def test_a_limit_of_the_warm_up_holds_in_ones_own_loop_as_in_a_run() -> None:
    schedule = Schedule("wsd", warmup_ratio=0.3, stable_ratio=0.2, max_warmup_steps=7)
    phase = BertPhase(100, 8, optim=LambConfig(lr=1.0, schedule=schedule))
    rates = curve(100, name="wsd", warmup_ratio=0.3, stable_ratio=0.2, max_warmup_steps=7)
    assert rates == [learning_rate(phase, step) for step in range(100)] and rates[5:7] == pytest.approx([6 / 7, 1.0])


def test_constant_stays_at_the_peak_after_its_warm_up() -> None:
    assert curve(10, name="constant", warmup_ratio=0.4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1])


def test_cosine_is_half_way_in_the_middle() -> None:
    values = curve(101, name="cosine", warmup_ratio=1 / 101)
    assert values[0] == values[1] == 1 and values[51] == pytest.approx(0.5)


def test_poly_nvidia_jumps_from_6e_3_to_5_08e_3_at_the_end_of_nvlambs_warm_up() -> None:
    rates = [6e-3 * value for value in curve(7038, name="poly_nvidia", warmup_ratio=0.2843, power=0.5)]
    assert f"{max(rates):.3e}" == "5.997e-03" and rates.index(max(rates)) == 1999
    assert f"{rates[2000]:.2e}" == "5.08e-03" and rates[-1] == 0


@pytest.mark.parametrize(("steps", "warmup_ratio"), [(7038, 0.2843), (1563, 0.128), (10, 0.3), (1, 0.1)])
def test_poly_nvidia_is_polywarmupscheduler_update_by_update(steps: int, warmup_ratio: float) -> None:
    # Its rule: last_epoch is the number of the coming update, from 1; progress = last_epoch / total_steps.
    expected = []
    for last_epoch in range(1, steps + 1):
        progress = last_epoch / steps
        expected.append(progress / warmup_ratio if progress < warmup_ratio else (1.0 - progress) ** 0.5)
    assert curve(steps, name="poly_nvidia", warmup_ratio=warmup_ratio, power=0.5) == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "w", "s"), [(3519, 0.4265, 0.2735), (782, 0.192, 0.108)])
@pytest.mark.parametrize("power", [1.0, 2.0])
def test_wsd_is_the_published_schedule_of_lans(steps: int, w: float, s: float, power: float) -> None:
    values = curve(steps, name="wsd", warmup_ratio=w, stable_ratio=s, power=power)
    for t, value in enumerate(values):
        # Counted as everywhere here: the warm-up by updates t + 1, the decay by steps t.
        up, at = (t + 1) / steps / w, t / steps
        assert value == pytest.approx(up if up <= 1 else 1.0 if at <= w + s else ((1 - at) / (1 - w - s)) ** power, rel=1e-12)
    assert values.count(1.0) == math.floor((w + s) * steps) + 1 - math.floor(w * steps)
    assert values[-1] == pytest.approx((1 / steps / (1 - w - s)) ** power)


def test_wsd_without_a_stable_part_is_poly() -> None:
    assert curve(97, name="wsd", warmup_ratio=0.2, power=0.7) == curve(97, name="poly", warmup_ratio=0.2, power=0.7)
    assert curve(10, name="wsd", warmup_ratio=0.5, stable_ratio=0.5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1])


def theirs(name: str, steps: int, w: int, power: float) -> list[float]:
    """Rates of transformers' schedule at steps 0, 1, ..."""
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = {
        "linear": lambda: transformers.get_linear_schedule_with_warmup(optimizer, w, steps),
        "poly": lambda: transformers.get_polynomial_decay_schedule_with_warmup(optimizer, w, steps, lr_end=0.0, power=power),
        "cosine": lambda: transformers.get_cosine_schedule_with_warmup(optimizer, w, steps),
        "constant": lambda: transformers.get_constant_schedule_with_warmup(optimizer, w),
        "wsd": lambda: transformers.get_wsd_schedule(
            optimizer, num_warmup_steps=w, num_stable_steps=w, num_decay_steps=steps - 2 * w, decay_type="linear"
        ),
    }[name]()
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", ["linear", "poly", "cosine", "constant", "wsd"])
@pytest.mark.parametrize(("steps", "w"), [(100, 10), (1000, 10), (20, 5)])
def test_it_is_transformers_schedule_with_the_warm_up_one_update_ahead(name: str, steps: int, w: int) -> None:
    extra = {"poly": {"power": 1.7}, "wsd": {"stable_ratio": w / steps}}.get(name, {})
    ours, reference = curve(steps, name=name, warmup_ratio=w / steps, **extra), theirs(name, steps, w, 1.7)
    assert ours[:w] == pytest.approx(reference[1 : w + 1]) and ours[w:] == pytest.approx(reference[w:])


@given(st.sampled_from(NAMES), st.integers(1, 200), st.integers(1, 200), st.floats(0, 1), st.floats(0, 1), st.floats(0.5, 2))
def test_one_schedule_over_two_phases_is_that_of_one_phase(
    name: str, first: int, second: int, warmup_ratio: float, stable: float, power: float
) -> None:
    settings = {**vars(schedules(name, warmup_ratio, stable, power)), "total_steps": first + second}
    whole = curve(first + second, **settings)
    assert curve(first, **settings) + curve(second, **{**settings, "step_offset": first}) == whole


def test_linear_falls_on_a_line_over_its_total_steps_where_the_phase_ends_before() -> None:
    long = Schedule(name="linear", warmup_ratio=0.0, total_steps=100_000)
    phase = BertPhase(steps=2_500, global_batch_size=32_768, optim=LambConfig(lr=3e-3, schedule=long))
    assert (resolved(phase).warmup_ratio, resolved(phase).total_steps) == (0.0, 100_000)
    assert [learning_rate(phase, step) for step in (0, 1_000, 2_499)] == pytest.approx([3e-3, 2.97e-3, 3e-3 * (1 - 0.02499)], rel=1e-12)
    assert curve(100, **vars(long)) == pytest.approx([1 - t / 100_000 for t in range(100)], rel=1e-12)
    shorter = BertPhase(steps=10, global_batch_size=8, optim=LambConfig(schedule=dataclasses.replace(long, total_steps=20)))
    assert learning_rate(shorter, 9) == pytest.approx(1e-3 * 11 / 20)


RULES = {"linear": lambda x: x, "sqrt": math.sqrt, "lamb_untuned": math.sqrt}


@given(st.sampled_from(sorted(RULES)), st.integers(1, 10**6), st.integers(1, 10**6), st.floats(1e-6, 10))
def test_a_rule_gives_lr_at_its_batch_and_scales_from_there(rule: Any, batch: int, reference: int, lr: float) -> None:
    optim = LambConfig(lr=lr, scaling=Scaling(rule, reference))
    assert peak_lr(BertPhase(1, reference, optim=optim)) == lr
    assert peak_lr(BertPhase(1, batch, optim=optim)) == pytest.approx(lr * RULES[rule](batch / reference), rel=1e-12)


def test_without_a_rule_the_rate_is_that_of_the_recipe_at_every_batch() -> None:
    assert {peak_lr(BertPhase(1, batch, optim=LambConfig(lr=0.3))) for batch in (1, 7, 65_536)} == {0.3}


@pytest.mark.parametrize("doublings", range(7))
def test_untuned_lamb_has_the_published_rates_and_3125_steps_of_warm_up_at_every_batch(doublings: int) -> None:
    # Table 4 of the paper: 5/(2^3.0·10^3) and 1/320 at 512, to 5/(2^0.0·10^3) and 1/5 at 32K, for equally many epochs.
    batch = 512 * 2**doublings
    phase = BertPhase(1_000_000 * 512 // batch, batch, optim=LambConfig(scaling=Scaling("lamb_untuned")))
    assert peak_lr(phase) == pytest.approx(5 / (2 ** (3 - doublings / 2) * 1e3), rel=1e-12)
    assert resolved(phase).warmup_ratio == pytest.approx(2**doublings / 320)
    top = [step for step in range(3_000, 3_200) if learning_rate(phase, step) == peak_lr(phase)]
    assert top[0] == 3_124


def test_untuned_lamb_begins_with_the_settings_of_the_recipe_where_it_names_their_batch() -> None:
    optim = LambConfig(lr=2e-3, scaling=Scaling("lamb_untuned", 64), schedule=Schedule(warmup_ratio=0.05))
    phase = BertPhase(100, 256, optim=optim)
    assert (peak_lr(phase), resolved(phase).warmup_ratio) == (4e-3, 0.2)


def test_the_rate_of_untuned_lamb_is_refused_for_another_optimizer_unless_its_own_is_named() -> None:
    phase = {"steps": 100, "global_batch_size": 256, "optim": {"name": "adamw", "scaling": {"rule": "lamb_untuned"}}}
    said = message(lambda: config.build_run(tree(phases={"short": phase})))
    assert said.startswith(
        "phases.short.optim.scaling.rule = lamb_untuned: its rate, 0.000625 at batch size 512, is LAMB's, not that of adamw;"
    )
    phase["optim"] = {"name": "adamw", "lr": 1e-4, "scaling": {"rule": "lamb_untuned", "base_batch_size": 128}}
    config.build_run(tree(phases={"short": phase}))


def test_rule_and_warm_up_are_those_of_the_full_batch_while_the_batch_warms_up() -> None:
    optim = LambConfig(scaling=Scaling("lamb_untuned"))
    plain, growing = (BertPhase(500, 4_096, batch_warmup=warmup, optim=optim) for warmup in (BatchWarmup(), BatchWarmup(256, 400)))
    assert [learning_rate(plain, step) for step in range(500)] == [learning_rate(growing, step) for step in range(500)]


@pytest.mark.parametrize("limit", [1, 7, 20, 50])
def test_a_limited_warm_up_is_followed_by_the_peak_and_leaves_the_decay_as_it_was(limit: int) -> None:
    plain = Schedule("wsd", warmup_ratio=0.2, stable_ratio=0.3)
    unlimited, limited = (
        BertPhase(100, 8, optim=LambConfig(lr=1.0, schedule=s)) for s in (plain, dataclasses.replace(plain, max_warmup_steps=limit))
    )
    rates, before = ([learning_rate(phase, step) for step in range(100)] for phase in (limited, unlimited))
    most = min(limit, 20)
    assert rates[:most] == pytest.approx([(step + 1) / most for step in range(most)])
    assert rates[most:50] == [1.0] * (50 - most) and rates[50:] == pytest.approx(before[50:])


def test_a_limited_warm_up_of_a_longer_schedule_counts_its_steps_and_untuned_lamb_has_it_too() -> None:
    half = BertPhase(100, 8, optim=LambConfig(lr=1.0, schedule=Schedule("poly", warmup_ratio=0.5, max_warmup_steps=10, total_steps=200)))
    assert learning_rate(half, 9) == pytest.approx(1.0) and learning_rate(half, 99) == pytest.approx((1 - 99 / 200) / 0.95)
    untuned = BertPhase(4_000, 2_048, optim=LambConfig(scaling=Scaling("lamb_untuned"), schedule=Schedule(max_warmup_steps=10)))
    assert learning_rate(untuned, 9) == pytest.approx(peak_lr(untuned)) and learning_rate(untuned, 8) < 0.95 * peak_lr(untuned)


@pytest.mark.parametrize("name", sorted(config.recipes()))
def test_a_phase_of_a_shipped_recipe_reaches_its_peak_and_stays_below(name: str) -> None:
    for phase in config.load_run(name).phases.values():
        rates = [learning_rate(phase, step) for step in range(0, phase.steps, max(1, phase.steps // 20_000))]
        assert min(rates) >= 0 and max(rates) <= peak_lr(phase)
        assert phase.optim.schedule.step_offset or max(rates) > 0.98 * peak_lr(phase)
