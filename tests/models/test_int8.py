"""Products in 8 bits: what they are in exact arithmetic, the same bits with and without a compiler, and a text that is alone or among others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight.bench.sizes import full_batch
from overnight.config.schema import BertConfig, ModernBertConfig
from overnight.errors import ConfigError
from overnight.finetune.predict import at_work
from overnight.models import encoder_native, int8
from overnight.models.bert import Linear
from overnight.models.encoders import masked_lm
from overnight.models.int8 import int8_product, is_exact, quantized

pytestmark = pytest.mark.skipif(not is_exact(), reason="this processor does not multiply 8 bits exactly")
needs_compiler = pytest.mark.skipif(not encoder_native.available(torch.float32), reason="no C compiler")


def drawn(rows: int, width: int, seed: int) -> torch.Tensor:
    """Rows of very different sizes, one of zeros."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-6, 4, rows)[:, None]
    x[rows // 2] = 0
    return x


@given(st.integers(1, 9), st.integers(1, 70), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_a_product_is_that_of_the_rounded_numbers(rows: int, width: int, out: int, bias: bool, seed: int) -> None:
    x, w = drawn(rows, width, seed), drawn(out, width, seed + 1)
    b = torch.randn(out) if bias else None
    # Every number is at most half a step of its row from what is multiplied.
    steps_x, steps_w = (a.double().abs().amax(1, keepdim=True) / 127 for a in (x, w))
    found, exact = int8_product(x, quantized(w, b)).double(), x.double() @ w.double().t() + (0 if b is None else b.double())
    off = (
        steps_x / 2 * w.abs().sum(1).double() + x.abs().sum(1, keepdim=True).double() * steps_w.t() / 2 + width * steps_x * steps_w.t() / 4
    ) * 1.001
    assert ((found - exact).abs() <= off + 1e-6 * exact.abs() + 1e-6).all()
    # Numbers that 8 bits hold are multiplied without an error.
    whole, weights = (torch.randint(-127, 128, (n, width), generator=torch.Generator().manual_seed(seed)).float() for n in (rows, out))
    whole[:, 0], weights[:, 0] = 127.0, -127.0
    torch.testing.assert_close(
        int8_product(whole, quantized(weights, b)), whole @ weights.t() + (0 if b is None else b), rtol=1e-6, atol=1e-3
    )


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_compiler_the_bits_are_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn(33, 130, 0).to(dtype), quantized(drawn(50, 130, 1), torch.randn(50))
    ours = int8_product(x, weight)
    monkeypatch.setattr(encoder_native, "available", lambda dtype: False)
    assert ours.dtype == dtype and torch.equal(ours, int8_product(x, weight))
    assert int8_product(x[:0], weight).shape == (0, 50)


@pytest.mark.parametrize("kind", [BertConfig, ModernBertConfig])
def test_a_network_in_8_bits_is_close_holds_each_weight_once_and_no_text_changes_another(kind: type[BertConfig]) -> None:
    torch.manual_seed(0)
    network = masked_lm(kind(num_layers=2, hidden_size=64, num_heads=2), 64).eval()
    for parameter in network.parameters():  # of a size at which something is computed
        parameter.data.mul_(4) if parameter.ndim > 1 else None
    one, three = full_batch(1, 9, 1, vocabulary=64), full_batch(3, 9, 1, vocabulary=64)
    with torch.inference_mode():
        before = network.encoder(three, torch.float32)
        at_work(network, "int8", torch.device("cpu"))
        after, alone = network.encoder(three, torch.bfloat16).float(), network.encoder(one, torch.bfloat16).float()
    assert torch.nn.functional.cosine_similarity(before, after).min() > 0.995
    assert torch.equal(one.ids_N, three.ids_N[:9]) and torch.equal(alone, after[:9])
    layers = [module for module in network.encoder.layers.modules() if isinstance(module, Linear)]
    assert len(layers) == 8 and all(m.in_8_bits is not None and m.packed is None and not m.weight.numel() for m in layers)


def test_a_processor_that_cannot_is_told_before_anything_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "is_exact", lambda: False)
    with pytest.raises(
        ConfigError, match="precision = int8: this processor or build of torch does not multiply 8 bits exactly; take bf16 or fp32"
    ):
        quantized(torch.ones(2, 2), None)
