"""Operations are counted as torch counts them, and peaks are those of the data sheets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from overnight.batches.packing import Batch, Sizes
from overnight.batches.streams import ByteBatch
from overnight.config import BertConfig, CausalLMConfig, Model, ModernBertConfig, RecurrentLMConfig
from overnight.models import bytes as byte_models
from overnight.models import flops
from overnight.models.bert import BertForPretraining
from overnight.models.bytes import byte_model
from overnight.models.flops import Peak, device_peak, known_peak, training_flops
from overnight.models.modernbert import ModernBertForMaskedLM
from tests.models.sample import random_batch


def counted(net: torch.nn.Module, batches: Sequence[Any]) -> int:
    """Operations of forward and backward as torch counts them, on the meta device, where products go through the operators that it knows."""
    with FlopCounterMode(display=False) as counter:
        for batch in batches:
            losses = net.losses(batch, torch.float32)[0]  # type: ignore[operator]
            torch.stack(list(losses.values())).sum().backward()
    return counter.get_total_flops()


def on_meta(batch: Any) -> Any:
    tensors = {name: value.to("meta") for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return replace(batch, **tensors, targets={name: value.to("meta") for name, value in batch.targets.items()})


@pytest.mark.parametrize("nsp", [True, False])
@pytest.mark.parametrize("sizes", [(3, 64, 4, 0), (1, 96, 2, 160)])
@pytest.mark.parametrize("lengths", [(48, 48), (17, 64, 5)])
def test_the_formula_of_bert_counts_what_torch_counts(sizes: tuple[int, int, int, int], lengths: tuple[int, ...], nsp: bool) -> None:
    layers, width, heads, ffn = sizes
    model = BertConfig(num_layers=layers, hidden_size=width, num_heads=heads, intermediate_size=ffn, max_position_embeddings=64)
    # One sequence a batch: together, attention would be padded to the longest here.
    batches: list[Batch] = [on_meta(random_batch([length], nsp=nsp)) for length in lengths]
    found = Sizes(sum(lengths), sum(n * n for n in lengths), sum(max(1, n // 6) for n in lengths), len(lengths) if nsp else 0)
    assert training_flops(model, 1000, found) == counted(BertForPretraining(model, 1000).to("meta"), batches)


@pytest.mark.parametrize("lengths", [(48, 48), (17, 64, 5)])
@pytest.mark.parametrize("inner", [0, 80])
@pytest.mark.parametrize("matching", [False, True])
def test_the_formula_of_modernbert_counts_what_torch_counts(matching: bool, inner: int, lengths: tuple[int, ...]) -> None:
    model = ModernBertConfig(num_layers=3, hidden_size=64, num_heads=4, intermediate_size=inner, max_position_embeddings=64)
    batches: list[Batch] = [on_meta(random_batch([length], nsp=False)) for length in lengths]
    if matching:
        batches = [replace(b, targets={**b.targets, "match": torch.zeros(len(b.ids_N), dtype=torch.int64, device="meta")}) for b in batches]
    found = Sizes(sum(lengths), sum(n * n for n in lengths), sum(max(1, n // 6) for n in lengths), 0, sum(lengths) * matching)
    assert training_flops(model, 1000, found) == counted(ModernBertForMaskedLM(model, 1000, matching=matching).to("meta"), batches)


def test_a_local_layer_is_counted_by_the_pairs_within_its_window() -> None:
    tokens, length = 4 * 64, 64
    sizes = Sizes(tokens, tokens * length, 40, 0)
    model = ModernBertConfig(num_layers=3, hidden_size=64, num_heads=4, local_attention=16)
    everywhere, local = (training_flops(each, 1000, sizes) for each in (replace(model, local_attention=0), model))
    # Of three layers two are local: a token meets itself and 16 others there, not all 64; torch counts what is computed, all of them.
    assert everywhere - local == 2 * 6 * 2 * 64 * tokens * (length - 17)
    assert training_flops(replace(model, local_attention=200), 1000, sizes) == everywhere


@pytest.mark.parametrize("rows", [(12, 12, 12), (16,)])
@pytest.mark.parametrize(
    "model",
    [
        RecurrentLMConfig(kind="mlstm", num_layers=1, hidden_size=48, embedding_size=24, weight_norm=True),
        RecurrentLMConfig(kind="mlstm", num_layers=3, hidden_size=32, weight_norm=True),
        RecurrentLMConfig(kind="lstm", num_layers=2, hidden_size=48),
        CausalLMConfig(num_layers=2, hidden_size=64, num_heads=4, max_position_embeddings=64, dropout=0.0),
        CausalLMConfig(num_layers=1, hidden_size=32, num_heads=2, intermediate_size=80, max_position_embeddings=512, dropout=0.0),
    ],
    ids=lambda model: f"{model.kind}-{model.num_layers}",
)
def test_the_formula_of_byte_models_counts_what_torch_counts(model: Model, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    # The head computes its products again in the backward pass on all devices but a CPU; recomputation does not count.
    monkeypatch.setattr(byte_models, "checkpoint", lambda function, *args, **_: function(*args))
    steps = rows[0]
    ids = torch.zeros(len(rows), steps, dtype=torch.long)
    batch = ByteBatch(ids, torch.arange(len(rows)), torch.ones(len(rows), dtype=torch.bool), {"byte": ids})
    found = Sizes(sum(rows), sum(n * n for n in rows), sum(rows), 0)
    assert training_flops(model, 256, found) == counted(byte_model(model).to("meta"), [on_meta(batch)])


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA H200 NVL", "bf16", 835),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A40", "bf16", 150),
        ("NVIDIA RTX A4000", "bf16", None),
        ("NVIDIA T400", "fp16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Something New", "bf16", None),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_whole_name(name: str, precision: str, tera: float | None) -> None:
    assert known_peak(name, precision) == (None if tera is None else Peak(tera * 1e12, measured=False))


def test_the_peak_of_a_cpu_is_measured_and_moves_no_generator() -> None:
    before = torch.get_rng_state()
    peak = device_peak(torch.device("cpu"), "fp32", torch.float32)
    assert peak is not None and peak.measured and peak.flops > 1e8
    assert torch.equal(torch.get_rng_state(), before)


def test_the_first_product_in_which_libraries_begin_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, took = [0.0], iter([10.0, *[0.001] * 100])

    def multiplier(weight: torch.Tensor, rows: int, times: int) -> Callable[[torch.Tensor], None]:
        def product(x: torch.Tensor) -> None:
            now[0] += next(took)

        return product

    monkeypatch.setattr(flops, "multiplier", multiplier)
    monkeypatch.setattr(flops, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(flops, "_SIZES", {"cpu": (64,), "cuda": ()})
    peak = flops._measured_peak.__wrapped__(torch.device("cpu"), torch.float32)
    assert peak.flops == pytest.approx(2 * 64**3 / 0.001)


def test_a_peak_says_where_it_is_from() -> None:
    assert Peak(989e12, measured=False).text() == "989 TFLOP/s"
    assert Peak(0.1234e12, measured=True).text() == "0.12 TFLOP/s, measured"


def test_the_peak_of_8_bits_is_unknown_where_it_is_in_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Something New")
    monkeypatch.setattr(flops, "_measured_peak", lambda *_: Peak(1e12, measured=True))
    cuda = torch.device("cuda")
    assert device_peak(cuda, "fp8", torch.bfloat16) is None
    assert device_peak(cuda, "bf16", torch.bfloat16) == Peak(1e12, measured=True)
