"""The least time of a step: its operations are those that are reported, its bytes those that fused kernels were counted to move, and the table of docs/gpu.md is the command's."""

from __future__ import annotations

import pytest

from overnight.batches.packing import Sizes
from overnight.bench.sizes import MODELS, VOCABULARY
from overnight.config import OPTIMIZERS
from overnight.models.flops import training_flops
from overnight.models.roofline import GPUS, OPTIMIZER_BYTES, Component, Rates, micro_batch, optimizer_step, parameters, table
from tests.conftest import ROOT
from tests.gpu.test_fused import LAYER

LARGE = MODELS["bert-large"]
SIZES = Sizes(16384, 16384 * 128, 2560, 128)


def test_operations_are_those_that_training_reports() -> None:
    for name in ("bert-base", "bert-large"):
        assert sum(part.flops for part in micro_batch(MODELS[name], VOCABULARY, SIZES, 2)) == pytest.approx(
            training_flops(MODELS[name], VOCABULARY, SIZES)
        )


def test_bytes_between_the_products_of_a_layer_are_those_that_its_kernels_were_counted_to_move() -> None:
    (between,) = (part for part in micro_batch(LARGE, VOCABULARY, SIZES, 2) if part.name == "norms, GELU, dropout")
    # Counted with the sums of their partial sums, and with statistics.
    assert between.bytes / LARGE.num_layers / 1e6 == pytest.approx(LAYER["triton"][1], rel=0.02)


def test_a_component_takes_the_longer_of_its_operations_and_its_bytes() -> None:
    rates = Rates(products=10.0, copy=2.0)
    assert Component("", 100, 4).seconds(rates) == 10.0 and Component("", 10, 4).seconds(rates) == 2.0


def test_micro_batches_of_a_step_share_its_casts_and_add_their_gradients() -> None:
    count = parameters(LARGE, VOCABULARY)
    one, four = (optimizer_step(LARGE, VOCABULARY, micro, 2, "lamb")[0].bytes for micro in (1, 4))
    assert (one, four) == (6 * count, (6 + 36) * count)
    assert optimizer_step(LARGE, VOCABULARY, 1, 4, "lamb")[0].bytes == 0  # fp32 casts nothing
    assert set(OPTIMIZER_BYTES) == set(OPTIMIZERS)


def test_the_table_of_the_documentation_is_that_of_the_command() -> None:
    found = table({name.removeprefix("bert-"): MODELS[name] for name in ("bert-base", "bert-large")}, VOCABULARY)
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert found in text
    for gpu in GPUS:
        assert f"{gpu.copy_share:.0%}".replace("%", " %") in text and f"{gpu.product_share:.0%}".replace("%", " %") in text
