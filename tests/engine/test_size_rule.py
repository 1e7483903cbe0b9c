"""The rule that chooses sizes: larger networks for more time and faster machines, smaller ones for little text, within memory; and what it is made of."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight import config
from overnight.config import BertRun, ModernBertConfig, MuonConfig
from overnight.engine.planner import shares
from overnight.engine.scaling_law import EXCESS, REPEATS, Law, layer_parameters, worth
from overnight.engine.size_rule import (
    CHARACTERS_PER_TOKEN,
    LADDER,
    VOCABULARIES,
    Score,
    Shape,
    Text,
    Timed,
    batch_of,
    best,
    candidates,
    flops_per_token,
    memory_of,
    muon_flops,
    rate_at,
    remarks,
    score,
    step_flops,
    with_shape,
)
from overnight.models.encoders import masked_lm
from overnight.optim.groups import parameter_groups

HOUR, GIGABYTE = 3600.0, 1e9
MACHINE = (Timed(0.0, 2e11),)
# Of its own, so that a better fit changes no claim here.
LAW = Law(floor=0.25, a_scale=60.0, a=0.34, b_scale=90.0, b=0.28)


def recipe(**changes: Any) -> BertRun:
    """A run whose sizes are open, with dotted changes written with __ for a dot."""
    run = config.load_run("night-auto", [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])
    assert isinstance(run, BertRun)
    return run


def text(characters: float = 1e12) -> Text:
    return Text(characters, CHARACTERS_PER_TOKEN)


def scores(
    run: BertRun, hours: float = 8, timed: tuple[Timed, ...] = MACHINE, read: Text | None = None, memory: float = 1e15
) -> list[Score]:
    read = read or text()
    return [score(run, shape, read, timed, hours * HOUR, memory, LAW) for shape in candidates(run, VOCABULARIES)]


def chosen(run: BertRun, **changes: Any) -> Score:
    found = best(scores(run, **changes))
    assert found is not None
    return found


def test_more_time_buys_a_larger_network() -> None:
    sizes = [chosen(recipe(), hours=hours).parameters for hours in (0.05, 0.5, 8, 100, 1000)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] < sizes[-1]


def test_a_faster_machine_buys_a_larger_network_and_the_same_work_the_same_one() -> None:
    slow, fast = (chosen(recipe(), timed=(Timed(0.0, rate),)) for rate in (1e11, 1e14))
    assert slow.parameters < fast.parameters
    assert chosen(recipe(), hours=80, timed=(Timed(0.0, 1e11),)).shape == chosen(recipe(), hours=8, timed=(Timed(0.0, 1e12),)).shape


def test_little_text_buys_a_smaller_network_and_a_smaller_vocabulary() -> None:
    sizes = [chosen(recipe(), hours=100, read=text(characters)) for characters in (4e6, 1e8, 1e12)]
    assert [s.parameters for s in sizes] == sorted(s.parameters for s in sizes) and sizes[0].parameters < sizes[-1].parameters / 3
    assert sizes[0].vocabulary == min(VOCABULARIES) < sizes[-1].vocabulary
    assert sizes[0].epochs > 20 and sizes[0].loss > sizes[1].loss > sizes[2].loss


def test_no_size_and_no_time_takes_more_from_the_loss_than_the_text_can_teach() -> None:
    least = LAW.loss(LAW.fitting(4e6) * (1 + EXCESS), 4e6 * (1 + REPEATS))
    assert LAW.loss_on(4e6, 1e30, 1e30) == pytest.approx(least) and least > LAW.floor + 0.5


def test_the_fitting_size_is_that_with_the_least_loss_for_the_work() -> None:
    n, d = LAW.fitting(1e9), 1e9
    assert LAW.loss(n, d) < min(LAW.loss(n * factor, d / factor) for factor in (0.5, 0.8, 1.25, 2.0))


def test_memory_is_respected_and_what_does_not_fit_says_so() -> None:
    free = chosen(recipe(), hours=1000)
    bound = chosen(recipe(), hours=1000, memory=free.memory / 2)
    assert bound.parameters < free.parameters and bound.memory <= free.memory / 2
    refused = next(s for s in scores(recipe(), memory=GIGABYTE) if (s.layers, s.width) == LADDER[-1])
    assert refused.refused.startswith("needs about ") and refused.refused.endswith(" GB of memory")
    assert best(scores(recipe(), memory=0.0)) is None


def test_the_estimate_of_memory_holds_the_state_of_every_parameter() -> None:
    run = with_shape(recipe(), Shape(2, 128, 4096), 32)
    assert isinstance(run.model, ModernBertConfig)
    parameters = sum(p.numel() for p in masked_lm(run.model, 4096, False).parameters() if p.ndim > 1)
    assert 16 * 0.95 * parameters < memory_of(run)
    assert (
        memory_of(with_shape(recipe(), Shape(4, 128, 4096), 32)) > memory_of(run) < memory_of(with_shape(recipe(), Shape(2, 128, 8192), 32))
    )


@pytest.mark.parametrize(
    ("layers", "precision", "again", "measured"),
    [
        (6, "bf16", "none", 466),
        (12, "bf16", "none", 872),
        (6, "fp32", "none", 856),
        (6, "bf16", "full", 339),
        (12, "bf16", "full", 404),
        (6, "fp32", "full", 543),
    ],
)
def test_the_estimate_of_memory_is_what_was_measured_in_each_precision(layers: int, precision: str, again: str, measured: int) -> None:
    """MB beside the state, of 32 full sequences of 128 tokens and 4,096 entries (one core of an EPYC, 2026-11-27)."""
    without_pairs = {f"phases__short__{key}": 0 for key in ("token_matching", "token_matching_steps", "final_token_matching")}
    full = {"phases__short__whole_sentences": False, "phases__short__short_seq_prob": 0, "phases__long": "null"}
    run = recipe(**without_pairs, **full, precision=precision, memory__activation_checkpointing=again)
    sized = with_shape(run, Shape(layers, 320, 4096), 32)
    assert isinstance(sized.model, ModernBertConfig)
    state = 16 * (layer_parameters(sized.model) + 4096 * 320)
    assert (memory_of(sized) - state) / 1e6 == pytest.approx(measured, rel=0.25)


def test_what_the_recipe_gives_stays() -> None:
    run = recipe(data__vocab_size=5000, phases__short__global_batch_size=24, phases__short__micro_batch_size=8)
    read = Text(1e9, {5000: 3.8})
    assert {shape.vocabulary for shape in candidates(run, VOCABULARIES)} == {5000}
    found = score(run, Shape(2, 128, 5000), read, MACHINE, HOUR, 1e15, LAW)
    sized = with_shape(run, found.shape, found.batch)
    assert (sized.data.vocab_size, sized.phases["short"].global_batch_size, found.sequences) == (5000, 24, 24)
    assert isinstance(sized.model, ModernBertConfig)
    assert (sized.model.size, sized.model.num_layers, sized.model.hidden_size, sized.model.num_heads) == ("given", 2, 128, 2)


def test_longer_sequences_come_in_smaller_batches_with_as_many_tokens() -> None:
    run = recipe(phases__short__seq_len=512, phases__short__short_seq_prob=0)
    assert with_shape(run, Shape(2, 128, 4096), 64).phases["short"].global_batch_size == 16


def test_sequences_that_are_half_as_long_are_twice_as_many_and_cost_about_as_much() -> None:
    half, full = (recipe(phases__short__short_seq_prob=short, phases__short__whole_sentences=False) for short in (1, 0))
    found = [with_shape(run, Shape(2, 128, 4096), 64).phases["short"].global_batch_size for run in (half, full)]
    assert found == [128, 64]
    a, b = (score(run, Shape(4, 256, 8192), text(), MACHINE, HOUR, 1e15, LAW) for run in (half, full))
    assert a.tokens == pytest.approx(b.tokens, rel=0.05) and a.seconds_per_step == pytest.approx(b.seconds_per_step, rel=0.05)
    assert a.batch == b.batch and a.sequences == 2 * b.sequences


def test_batches_are_powers_of_two_that_grow_with_the_tokens() -> None:
    assert [batch_of(tokens) for tokens in (0, 1e6, 2.4e6, 2.4e7, 2.4e9, 1e15)] == [16, 16, 16, 32, 256, 1024]
    found = chosen(recipe(), hours=100)
    assert found.batch == batch_of(found.tokens) > 16


def test_the_rate_lies_between_those_that_were_timed() -> None:
    timed = (Timed(1e8, 4e11), Timed(1e6, 1e11))
    assert rate_at(1e5, timed) == 1e11 and rate_at(1e9, timed) == 4e11
    assert rate_at(1e7, timed) == pytest.approx(2.5e11)
    assert rate_at(1e7, timed[:1]) == 4e11


def test_where_steps_wait_for_the_host_the_batch_is_larger_and_the_loss_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that could do 3e14 operations a second, whose host takes 3 ms to launch a layer, for five minutes."""
    free, waiting = Timed(0.0, 3e14), Timed(0.0, 3e14, launch=3e-3)
    fast, slow = (chosen(recipe(), hours=1 / 12, timed=(one,)) for one in (free, waiting))
    assert slow.batch > batch_of(slow.tokens) and fast.batch == batch_of(fast.tokens)
    assert slow.seconds_per_step >= 3e-3 * slow.layers and slow.loss > fast.loss
    # In a night the network is so large that nothing waits.
    assert chosen(recipe(), timed=(free,)) == chosen(recipe(), timed=(waiting,))
    monkeypatch.setattr("overnight.engine.size_rule._MOST_WAITING", 1)
    usual = chosen(recipe(), hours=1 / 12, timed=(waiting,))
    assert usual.batch == batch_of(usual.tokens) and usual.loss > slow.loss + 0.01


def test_what_an_h100_was_timed_at_in_two_minutes_takes_large_batches() -> None:
    """Operations a token, rate, and time of a layer of three networks, of which 6 x 320 was delayed (benchmarks/results/2026-11-27-h100)."""
    run = recipe(data__vocab_size=8192)
    shapes = {(10, 448): (7.26e13, 0.0), (6, 320): (6.30e13, 8.37e-3), (8, 384): (7.92e13, 4.46e-3)}
    timed = [Timed(flops_per_token(with_shape(run, Shape(*shape, 8192), 128)), *found) for shape, found in shapes.items()]
    found = chosen(run, hours=119 / 3600, timed=timed)
    assert (found.layers, found.width) == (8, 384)
    # In batches of 128 sequences of 128 tokens, as it was chosen then, 27 million were read in this time.
    assert found.batch >= 256 and found.tokens > 6e7 and found.seconds_per_step < 0.06


@given(st.floats(1, 1e12), st.floats(1, 1e12), st.floats(1, 1e12))
def test_repeated_text_is_worth_less_than_new_text_and_never_less_than_before(unique: float, a: float, b: float) -> None:
    (low, high), slack = sorted((a, b)), 1 + 1e-9
    assert worth(low, unique, REPEATS) <= worth(high, unique, REPEATS) * slack
    assert worth(low, unique, REPEATS) <= low * slack and worth(high, unique, REPEATS) <= max(unique, (1 + REPEATS) * unique) * slack
    if high <= unique:
        assert worth(high, unique, REPEATS) == high


def test_four_passes_are_worth_nearly_four_times_the_text_and_forty_are_not() -> None:
    # Computed from the paper's formula by hand: 1 + 15.39 (1 - exp(-3/15.39)), 1 + 15.39 (1 - exp(-39/15.39)).
    assert worth(4.0, 1.0, REPEATS) == pytest.approx(3.727, abs=0.01)
    assert worth(40.0, 1.0, REPEATS) == pytest.approx(15.17, abs=0.03)


def test_repetitions_and_a_vocabulary_without_text_are_said() -> None:
    read = text(2e6)
    found = chosen(recipe(data__vocab_size=4096), hours=8, read=read)
    passes, entries = remarks(found, read)
    assert f"read the text (2.0 M characters) {found.epochs:,.0f} times. More than about 4 passes help little" in passes
    assert entries.startswith("data.vocab_size = 4096: the text has 129 tokens for each entry")
    assert remarks(chosen(recipe(), hours=0.1), text()) == []


def test_the_ladder_doubles_and_has_heads_of_64() -> None:
    sizes = [layer_parameters(ModernBertConfig(num_layers=layers, hidden_size=width)) for layers, width in LADDER]
    assert all(1.3 < after / before < 4 for before, after in pairwise(sizes))
    assert all(width % 64 == 0 for _, width in LADDER)


def test_the_parameters_of_the_law_are_those_of_the_layers() -> None:
    model = ModernBertConfig(num_layers=3, hidden_size=96, num_heads=3)
    network = masked_lm(model, 100, False)
    matrices = sum(p.numel() for name, p in network.named_parameters() if ".layers." in name and p.ndim == 2)
    assert layer_parameters(dataclasses.replace(model)) == matrices


def test_the_operations_of_muon_are_those_of_every_matrix_that_it_steps_five_times_whatever_the_batch() -> None:
    runs = [with_shape(recipe(), Shape(3, 192, 4096), batch) for batch in (16, 64)]
    assert isinstance(runs[0].model, ModernBertConfig)
    groups = parameter_groups(masked_lm(runs[0].model, 4096, False), MuonConfig())
    shapes = [sorted(p.shape) for group in groups if group["muon"] for _, p in group["params"]]
    # X Xᵀ and a product with it, of 2 m² n each, and one of two m x m, of 2 m³.
    expected = sum(5 * (4 * m * m * n + 2 * m**3) for m, n in shapes)
    assert len(shapes) == 4 * 3 + 1 and muon_flops(runs[0].model) == expected
    assert [step_flops(run) - expected for run in runs] == pytest.approx([shares(run)[0].flops for run in runs])
