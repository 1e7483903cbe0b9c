"""The gates of `overnight bench gpu` pass on a CPU, and stop what computes something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overnight.bench import gates
from overnight.models.bert import Encoder
from tests.bench.test_benchmarks import one_thread  # noqa: F401

CPU = torch.device("cpu")


def test_the_gates_pass_on_a_sound_computation() -> None:
    assert gates.packed_gate(CPU).value < 1e-5
    assert gates.precision_gate(CPU).value < 1e-5
    assert gates.lamb_gate(CPU).value < 1e-5
    assert gates.gradient_gate(CPU).value < 1e-5
    assert gates.dropout_gate(CPU).value < 1e-5


def test_the_precision_gate_stops_losses_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = gates.BertForPretraining.losses, 0

    def broken(self: Any, batch: Any, dtype: torch.dtype) -> Any:
        nonlocal calls
        calls += 1
        summed, hits = real(self, batch, dtype)
        return ({**summed, "nsp": summed["nsp"] * 1.03} if calls == 2 else summed), hits

    monkeypatch.setattr(gates.BertForPretraining, "losses", broken)
    with pytest.raises(AssertionError, match="losses differ by"):
        gates.precision_gate(CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_packed_gate_stops_attention_across_sequences_in_either_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = gates._encoded, 0

    def leaking(net: Any, batch: Any, _: torch.dtype, device: torch.device) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            whole = int(batch.starts[-1])
            batch = gates.replace(batch, starts=torch.tensor([0, whole], dtype=torch.int32), lengths=(whole,))
        return real(net, batch, dtype if calls == 2 else torch.float32, device)

    monkeypatch.setattr(gates, "_encoded", leaking)
    with pytest.raises(AssertionError, match=r"packed encoder differs by 0\.1"):
        gates.packed_gate(CPU)


def test_the_lamb_gate_stops_an_optimizer_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(gates.Lamb):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.dtype == torch.float32:
                        p.grad.add_(0.01)
            return super().step()

    monkeypatch.setattr(gates, "Lamb", Wrong)
    with pytest.raises(AssertionError, match="LAMB differs by"):
        gates.lamb_gate(CPU)


@pytest.mark.parametrize("wrong", ["forward", "backward", "share"])
def test_the_dropout_gate_stops_attention_that_is_wrong(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gates.attend.attention

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * 1.01

    def broken(qkv: torch.Tensor, heads: int, where: Any, probability: float) -> torch.Tensor:
        if wrong == "share":
            return real(qkv, heads, where, 0.0)
        out = real(qkv, heads, where, probability)
        return out * 1.01 if wrong == "forward" else Off.apply(out)

    monkeypatch.setattr(gates.attend, "attention", broken)
    with pytest.raises(AssertionError, match="differs by"):
        gates.dropout_gate(CPU)


def test_the_gradient_gate_stops_a_wrong_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = Encoder.forward, 0

    def other(self: Any, batch: Any, dtype: torch.dtype) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = forward(self, batch, dtype)
        return out if calls == 1 else out * 1.02 - (out * 0.02).detach()

    monkeypatch.setattr(Encoder, "forward", other)
    with pytest.raises(AssertionError, match=r"gradients differ by 0\.02"):
        gates.gradient_gate(CPU)
