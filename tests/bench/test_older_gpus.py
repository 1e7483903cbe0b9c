"""The benchmarks of an older GPU, or one for which Triton makes no kernels: they measure the forms that training takes there."""

from __future__ import annotations

import pytest
import torch

from overnight.bench import gpu, sizes
from overnight.models.attention import why_padded
from overnight.models.bert import BertForPretraining, Encoder
from overnight.models.fused_layer import why_not
from tests.bench.test_benchmarks import assert_result


@pytest.mark.parametrize(
    ("capability", "why", "compiled"), [((7, 5), "", True), ((7, 5), "Triton needs a C compiler", False), ((6, 0), "", False)]
)
def test_only_those_layers_are_compiled_that_training_would_compile(
    capability: tuple[int, int], why: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, asked = BertForPretraining(sizes.MODELS["bert-tiny"], 100), []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("overnight.models.fused_layer.why_no_triton", lambda: why)
    monkeypatch.setattr(Encoder, "compile_layers", lambda encoder: asked.append(encoder))
    why_padded.cache_clear(), why_not.cache_clear()
    sizes.set_up_layers(net.encoder, torch.device("cuda"), torch.bfloat16)
    why_padded.cache_clear(), why_not.cache_clear()
    assert asked == [net.encoder] * compiled


def test_a_gpu_without_bf16_is_measured_in_fp16(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    real = BertForPretraining.losses
    monkeypatch.setattr(BertForPretraining, "losses", lambda net, batch, dtype: (seen.append(dtype), real(net, batch, torch.float32))[1])
    monkeypatch.setattr(gpu, "GATES", ())
    monkeypatch.setattr(gpu, "why_lists", lambda device: "they are none of this claim")
    monkeypatch.setattr(gpu, "sixteen_bits", lambda device: "fp16")
    gpu.run(tiny=True)
    names = [row["name"] for row in assert_result(capsys.readouterr().out, "gpu")]
    assert {"ceiling: fp16 product", "bert-tiny 32 fp16", "mLSTM H32 fp16"} <= set(names) and not any("bf16" in name for name in names)
    assert set(seen) == {torch.float16}


def test_optimizers_without_kernels_are_left_out_and_all_else_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "GATES", ())
    monkeypatch.setattr(gpu, "TINY", [])
    monkeypatch.setattr(gpu, "byte_rows", lambda *args: [])
    monkeypatch.setattr(gpu, "why_lists", lambda device: "Triton needs a C compiler: install gcc, or set CC")
    gpu.run(tiny=True)
    text = capsys.readouterr().out
    assert "left out: optimizers, since Triton needs a C compiler: install gcc, or set CC\n" in text
    assert [row["name"] for row in assert_result(text, "gpu")] == ["ceiling: bf16 product", "ceiling: copy"]


@pytest.mark.parametrize(
    ("multiplies", "installed", "why"),
    [
        (False, True, "the device multiplies in 16 bits at least"),
        (True, False, "torchao is not installed"),
        (True, True, ""),
    ],
)
def test_products_in_8_bits_are_measured_where_there_are_any(
    multiplies: bool, installed: bool, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_8_bits: list[object] = []
    monkeypatch.setattr(gpu, "GATES", ())
    monkeypatch.setattr(gpu, "TINY", [gpu.Case("bert-tiny", 32, 4, precision="fp8")])
    monkeypatch.setattr(gpu, "byte_rows", lambda *args: [])
    monkeypatch.setattr(gpu, "why_lists", lambda device: "they are none of this claim")
    monkeypatch.setattr(gpu, "multiplies_in_8_bits", lambda device: multiplies)
    monkeypatch.setattr(gpu, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(gpu, "to_fp8", lambda net, device: in_8_bits.append(net))
    gpu.run(tiny=True)
    text = capsys.readouterr().out
    names = [row["name"] for row in assert_result(text, "gpu")]
    assert ("bert-tiny 32 fp8" in names) == (len(in_8_bits) == 1) == (not why)
    assert (f"left out: bert-tiny 32 fp8, since {why}\n" in text) == bool(why)
