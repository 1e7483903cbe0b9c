"""The noise scale is that of problems whose noise is known, and is unknown rather than wrong."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from overnight.optim.noise import MicroGradients, NoiseScale, Pair, cost, follow, noise_text
from tests.optim.problem import draw

sizes = st.tuples(st.integers(1, 1000), st.integers(1, 1000)).map(lambda x: (x[0], x[0] + x[1]))
squares = st.floats(1e-6, 1e6)


def pair_of(grads: Tensor, micro: int) -> tuple[float, float, float, int]:
    """The numbers of a pair from the gradients of single sequences (B, D), cut into micro-batches of equal size."""
    B = len(grads)
    small = grads.view(micro, B // micro, -1).mean(1).square().sum(1).mean()
    return float(small), float(grads.mean(0).square().sum()), B / micro, B


@pytest.mark.parametrize("scale", [10.0, 60.0, 300.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_scale_of_a_known_noise_is_found_within_a_tenth_after_500_pairs(scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(200, generator=generator, dtype=torch.float64)
    spread = torch.rand(200, generator=generator, dtype=torch.float64)  # of each direction
    spread *= (scale * truth.square().sum() / spread.square().sum()).sqrt()
    found = NoiseScale()
    for _ in range(500):
        # The means of 8 micro-batches of 64, drawn as what they are.
        means = truth + torch.randn(8, 200, generator=generator, dtype=torch.float64) * spread / 8
        small, big, _, _ = pair_of(means, micro=8)
        found.update(small, big, 64, 512)
    assert found.value == pytest.approx(scale, rel=0.1)
    assert found.noise == pytest.approx(float(spread.square().sum()), rel=0.1)
    assert found.signal == pytest.approx(float(truth.square().sum()), rel=0.1)


def test_the_estimates_are_unbiased_over_every_possible_step() -> None:
    examples = draw(4, 3)
    noise, signal = [], []
    for chosen in itertools.product(range(4), repeat=4):
        one = NoiseScale()
        one.update(*pair_of(examples[list(chosen)], micro=2))
        noise.append(one.noise)
        signal.append(one.signal)
    mean = examples.mean(0)
    assert math.fsum(noise) / 256 == pytest.approx(float((examples - mean).square().sum() / 4), rel=1e-12)
    assert math.fsum(signal) / 256 == pytest.approx(float(mean.square().sum()), rel=1e-12)


@given(squares, sizes, st.integers(2, 50))
def test_pairs_without_noise_give_a_scale_of_nothing(square: float, size: tuple[int, int], count: int) -> None:
    found = NoiseScale()
    for _ in range(count):
        found.update(square, square, *size)
    assert found.noise == 0 and found.value == 0
    assert found.signal == pytest.approx(square, rel=1e-12)


@given(squares, squares, sizes, st.integers(1, 50))
def test_pairs_as_expected_give_the_truth_from_the_first_on(noise: float, signal: float, size: tuple[int, int], count: int) -> None:
    b, B = size
    found = NoiseScale()
    for _ in range(count):
        found.update(signal + noise / b, signal + noise / B, b, B)
    # Where one is small beside the other, digits are lost in their difference.
    lost = 1e-12 * (signal + noise / b) * B / (B - b) * max(1, b)
    assert found.noise == pytest.approx(noise, rel=1e-12, abs=lost)
    assert found.signal == pytest.approx(signal, rel=1e-12, abs=lost)


@given(st.lists(st.tuples(squares, squares, sizes), min_size=1, max_size=30))
def test_a_saved_state_goes_on_bit_by_bit(pairs: list[tuple[float, float, tuple[int, int]]]) -> None:
    whole, cut = NoiseScale(), NoiseScale()
    for small, big, size in pairs:
        whole.update(small, big, *size)
        cut = NoiseScale(*json.loads(json.dumps(cut.state)))
        cut.update(small, big, *size)
    assert cut == whole and cut.value == whole.value


def test_a_gradient_lost_in_its_noise_is_unknown_and_no_number() -> None:
    found = NoiseScale()
    assert found.value is None and math.isnan(found.noise) and math.isnan(found.signal)
    for _ in range(3):
        found.update(1.0, 0.1, 8, 64)
        assert found.signal < 0
        assert found.value is None
    assert "unknown" in noise_text(found.value, 64)
    found = NoiseScale()
    for _ in range(3):
        found.update(1.0, 0.125, 8, 64)
    assert found.signal == 0 and found.value is None, "0 is not above 0"


def test_one_pair_cannot_be_judged_and_two_that_agree_can() -> None:
    found = NoiseScale()
    found.update(2.0, 1.5, 8, 64)
    assert found.error == math.inf and found.value is None
    found.update(2.0, 1.5, 8, 64)
    assert found.error == pytest.approx(0, abs=1e-6) and found.value == pytest.approx(found.noise / found.signal)


@pytest.mark.parametrize("pairs", [10, 60, 400])
def test_the_standard_error_is_the_spread_of_the_estimate_over_repetitions(pairs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    bigs = 1 + 0.4 * torch.randn(400, pairs, generator=generator, dtype=torch.float64)
    estimates, errors = [], []
    for row in bigs.tolist():
        found = NoiseScale()
        for big in row:
            found.update(3.0, big, 8, 64)
        estimates.append(found.signal)
        errors.append(found.error**2)
    assert math.fsum(errors) / 400 == pytest.approx(float(torch.tensor(estimates).var()), rel=0.2)


def test_pure_noise_is_seldom_taken_for_a_gradient() -> None:
    generator, known = torch.Generator().manual_seed(1), 0
    for _ in range(300):
        found = NoiseScale()
        for means in torch.randn(50, 4, 100, generator=generator, dtype=torch.float64):
            small, big, _, _ = pair_of(means, micro=4)
            found.update(small, big, 8, 32)
        known += found.value is not None
    assert known <= 0.05 * 300


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_pair_that_is_not_finite_is_left_out(bad: float) -> None:
    found = NoiseScale()
    found.update(2.0, 1.5, 8, 64)
    before = found.state
    found.update(bad, 1.5, 8, 64)
    found.update(2.0, bad, 8, 64)
    assert found.state == before


@pytest.mark.parametrize("size", [(8, 8), (0, 8), (9, 8)])
def test_batches_that_do_not_differ_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be smaller"):
        NoiseScale().update(1.0, 1.0, *size)


def test_at_the_critical_batch_steps_and_examples_are_twice_their_least() -> None:
    assert cost(512, 512) == (2, 2)
    assert cost(1000, 10) == (101, 1.01)
    assert cost(0, 10) == (1, math.inf)
    assert noise_text(1240.4, 512) == "noise scale 1,240 sequences (batch 512: 3.4 times the fewest steps, 1.4 times the fewest examples)"


def test_the_run_is_the_sum_of_its_groups_and_each_keeps_its_own_average() -> None:
    states: dict[str, list[float]] = {}
    pair = Pair(["matrices", "vectors"], torch.tensor([4.0, 1.0]), torch.tensor([3.0, 0.1]), 8, 64)
    for _ in range(2):
        scales = follow(states, pair)
    assert list(scales) == ["run", "matrices", "vectors"]
    assert scales["matrices"] == pytest.approx((4 - 3) / (1 / 8 - 1 / 64) / ((64 * 3 - 8 * 4) / 56), rel=1e-4)
    assert scales["vectors"] is None
    assert scales["run"] == pytest.approx((5 - 3.1) / (1 / 8 - 1 / 64) / ((64 * 3.1 - 8 * 5) / 56), rel=1e-4)
    for at in (2, 3):  # sums of S and of |G|²
        assert states["run"][at] == pytest.approx(states["matrices"][at] + states["vectors"][at])


def test_groups_of_one_name_count_as_one() -> None:
    """As with a learning rate for each layer, of which every one has its matrices."""
    layers = Pair(["matrices", "vectors", "matrices"], torch.tensor([4.0, 1.0, 2.0]), torch.tensor([3.0, 0.1, 1.5]), 8, 64)
    assert layers.squares() == {"run": (7.0, pytest.approx(4.6)), "matrices": (6.0, 4.5), "vectors": (1.0, pytest.approx(0.1))}


def test_the_scale_of_a_linear_regression_is_that_of_its_per_example_gradients() -> None:
    x, noise = draw(400, 5, seed=1), draw(400, seed=2)
    y = x @ draw(5, seed=3) + 2 * noise
    model = nn.Linear(5, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(draw(1, 5, seed=4))
        model.bias.zero_()
        residual = model(x).squeeze(1) - y
    # Of the loss residual²/2, by hand.
    per_example = residual[:, None] * torch.cat([x, torch.ones(400, 1, dtype=torch.float64)], 1)
    mean = per_example.mean(0)
    truth = float((per_example - mean).square().sum() / 400 / mean.square().sum())

    optimizer = torch.optim.SGD([{"params": [model.weight], "name": "matrices"}, {"params": [model.bias], "name": "vectors"}], lr=0.1)
    generator, states = torch.Generator().manual_seed(0), dict[str, list[float]]()
    for _ in range(500):
        chosen = torch.randint(0, 400, (8, 16), generator=generator)
        micro = MicroGradients(optimizer)
        for index in chosen:
            loss = (model(x[index]).squeeze(1) - y[index]).square().sum() / 2 / chosen.numel()
            with micro.apart():
                loss.backward()
        scales = follow(states, micro.pair(chosen.numel()))
        optimizer.zero_grad()
    assert truth > 1
    assert scales["run"] == pytest.approx(truth, rel=0.1)


def test_gradients_taken_apart_add_up_bit_by_bit_and_are_each_that_of_their_own_mean() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
    model[2].weight = nn.Parameter(model[0].weight.detach().t().clone())
    unused = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [unused]}], lr=0.1)
    batches = draw(5, 7, 6, seed=5, dtype=torch.float32)

    def backward(x: Tensor, divisor: int) -> None:
        (model(x).square().sum() / divisor).backward()

    alone = []
    for x in batches:
        backward(x, 7)
        alone.append(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
        optimizer.zero_grad()
    for x in batches:
        backward(x, 35)
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.zero_grad()
    micro = MicroGradients(optimizer)
    for x in batches:
        with micro.apart():
            backward(x, 35)
    assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
    assert unused.grad is None
    pair = micro.pair(35)
    assert (pair.groups, pair.b, pair.B) == (["0", "1"], 7, 35)
    small, big = pair.squares()["run"]
    assert small == pytest.approx(sum(alone) / 5, rel=1e-5)
    assert big == pytest.approx(sum(float(g.double().square().sum()) for g in plain), rel=1e-6)
    assert pair.squares()["1"] == (0, 0)
