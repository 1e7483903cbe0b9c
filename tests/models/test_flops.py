"""Operations are counted as torch counts them, and peaks are those of the data sheets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from overnight.batches.packing import Sizes
from overnight.bench.sizes import full_batch
from overnight.config import Model
from overnight.models.bert import BertForPretraining
from overnight.models.flops import Peak, device_peak, known_peak, training_flops


@pytest.mark.parametrize("nsp", [True, False])
@pytest.mark.parametrize("sizes", [(3, 64, 4, 0), (1, 96, 2, 160)])
@pytest.mark.parametrize(("sequences", "length", "predicted"), [(5, 48, 7), (2, 17, 3)])
def test_the_formula_counts_what_torch_counts(
    sizes: tuple[int, int, int, int], sequences: int, length: int, predicted: int, nsp: bool
) -> None:
    layers, width, heads, ffn = sizes
    model = Model(layers=layers, width=width, heads=heads, ffn=ffn, max_length=64)
    # On the meta device, where products go through the operators that torch counts.
    net, batch = BertForPretraining(model, 1000).to("meta"), full_batch(sequences, length, predicted, 1000)
    batch = replace(
        batch,
        **{name: value.to("meta") for name, value in vars(batch).items() if isinstance(value, torch.Tensor)},
        targets={name: value.to("meta") for name, value in batch.targets.items() if nsp or name != "nsp"},
    )
    with FlopCounterMode(display=False) as counter:
        losses, _ = net.losses(batch, torch.float32)
        torch.stack(list(losses.values())).sum().backward()
    counted = Sizes(sequences * length, sequences * length**2, sequences * predicted, sequences if nsp else 0)
    assert training_flops(model, 1000, counted) == counter.get_total_flops()


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
    assert peak.measured and peak.flops > 1e8
    assert torch.equal(torch.get_rng_state(), before)


def test_a_peak_says_where_it_is_from() -> None:
    assert Peak(989e12, measured=False).text() == "989 TFLOP/s"
    assert Peak(0.1234e12, measured=True).text() == "0.12 TFLOP/s, measured"
