"""The gates of `overnight bench gpu`: what is timed computes the right thing, compared with a CPU in fp32 or with formulas in float64."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F

from overnight.batches.packing import Batch
from overnight.bench.measure import Row
from overnight.bench.sizes import full_batch, set_up_layers, training_dtype
from overnight.config import BertConfig
from overnight.models import attention as attend
from overnight.models.bert import BertForPretraining
from overnight.models.fused_layer import why_not
from overnight.optim import Lamb
from overnight.optim.batch import backend_of


def uneven_batch(model: BertConfig, vocabulary: int) -> Batch:
    """Return a packed batch of four lengths."""
    lengths = (model.max_position_embeddings, 7, 33, 18)
    whole = full_batch(1, sum(lengths), 12, vocabulary)
    positions = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    segments = torch.cat([(torch.arange(n) >= n // 2).long() for n in lengths])
    targets = {**whole.targets, "nsp": torch.tensor([0, 1, 1, 0])}
    return replace(whole, positions_N=positions, segments_N=segments, starts=starts, lengths=lengths, targets=targets)


@torch.no_grad()
def _losses(net: BertForPretraining, batch: Batch, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.stack(list(net.to(device).losses(batch.to(device), dtype)[0].values())).double().cpu()


@torch.no_grad()
def _encoded(net: BertForPretraining, batch: Batch, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return net.to(device).encoder(batch.to(device), dtype).double().cpu()


def _gate_model() -> tuple[BertForPretraining, Batch]:
    torch.manual_seed(0)
    model = BertConfig(num_layers=2, hidden_size=128, num_heads=2, max_position_embeddings=64, dropout=0.0, attention_dropout=0.0)
    net = BertForPretraining(model, 1000)
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim > 1:
                p.mul_(4)
    return net, uneven_batch(model, 1000)


def packed_gate(device: torch.device) -> Row:
    """Return relative difference of the encoder's output with variable-length attention, and with padded attention in fp32 on the CPU.

    Not of the losses: of these untrained weights, attention that leaks between sequences moves them by 0.9 %, less than bf16 may, and
    the output by 17 %, where bf16 moves it by 0.7 %.
    """
    net, batch = _gate_model()
    reference = _encoded(net, batch, torch.float32, torch.device("cpu"))
    dtype = training_dtype(device)
    error = float((_encoded(net, batch, dtype, device) - reference).norm() / reference.norm())
    varlen = attend.layout(batch.to(device), 0.0, dtype, size=64).varlen
    _require(error < (0.03 if dtype.itemsize == 2 else 1e-5), f"the packed encoder differs by {error:.2g} from the reference")
    return Row(f"gate: packed encoder ({'varlen' if varlen else 'padded'} {str(dtype)[6:]})", error, "error")


def precision_gate(device: torch.device) -> Row:
    """Return relative difference of fp32 losses on the device and on the CPU."""
    net, batch = _gate_model()
    reference = _losses(net, batch, torch.float32, torch.device("cpu"))
    error = float(((_losses(net, batch, torch.float32, device) - reference).abs() / reference).max())
    _require(error < 1e-4, f"fp32 losses differ by {error:.2g} between the device and the CPU")
    return Row("gate: fp32 losses, device against CPU", error, "error")


def lamb_gate(device: torch.device) -> Row:
    """Return largest relative difference after 10 steps of LAMB in fp32 on the device and in float64 on the CPU."""
    results, by = [], ""
    for where, dtype in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 32, generator=generator, dtype=torch.float64).to(where, dtype).requires_grad_()
        optimizer = Lamb([x], lr=0.01, max_grad_norm=1.0)
        for _ in range(10):
            x.grad = torch.randn(64, 32, generator=generator, dtype=torch.float64).to(where, dtype)
            optimizer.step()
        by = by or backend_of(x, x, optimizer.param_groups[0])
        results.append(x.detach().cpu().double())
    error = float((results[0] - results[1]).norm() / results[1].norm())
    _require(error < 1e-5, f"LAMB differs by {error:.2g} from float64")
    return Row(f"gate: LAMB fp32 against float64 ({by})", error, "error")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def gradient_gate(device: torch.device) -> Row:
    """Return relative difference of all gradients of the encoder, of fused layers (where they cannot be, of compiled ones, if those can) in 16 bits on a GPU, and in fp32 on the CPU."""
    net, batch = _gate_model()
    generator, found = torch.Generator().manual_seed(2), []
    weight = torch.randn(len(batch.ids_N), 128, generator=generator)
    for where, dtype in ((torch.device("cpu"), torch.float32), (device, training_dtype(device))):
        here = copy.deepcopy(net).to(where)
        set_up_layers(here.encoder, where, dtype)
        (here.encoder(batch.to(where), dtype).float() * weight.to(where)).sum().backward()
        found.append(torch.cat([p.grad.double().cpu().flatten() for p in here.encoder.parameters() if p.grad is not None]))
    error = float((found[1] - found[0]).norm() / found[0].norm())
    _require(error < (0.05 if device.type == "cuda" else 1e-5), f"the encoder's gradients differ by {error:.2g} from the reference")
    return Row("gate: gradients of the packed encoder", error, "error")


def dropout_gate(device: torch.device) -> Row:
    """Return relative difference of attention with dropped weights, forward and backward, and of the formula in float64 with the same dropped.

    Values that are rows of the identity show which weights were kept; with the same seed they are the same for any values.
    """
    heads, size, p, dtype = 2, 64, 0.125, training_dtype(device)
    batch = uneven_batch(BertConfig(max_position_embeddings=size), 1000)
    tokens, where = len(batch.ids_N), attend.layout(batch.to(device), p, dtype, size=size)
    qkv = torch.randn(tokens, 3, heads, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.randn(tokens, heads * size, generator=torch.Generator().manual_seed(2))
    shown = qkv.clone()
    shown[:, 2] = F.one_hot(batch.positions_N, size)[:, None].to(dtype)

    def attended(given: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return attend.attention(given.flatten(1), heads, where, p)

    kept = attended(shown.to(device)).view(tokens, heads, size).cpu() != 0
    ours, formula = qkv.to(device, copy=True).requires_grad_(), qkv.double().requires_grad_()
    outs, first = [], 0
    for length in batch.lengths:
        q, k, v = formula[first : first + length].permute(1, 2, 0, 3)
        keep = kept[first : first + length, :, :length].transpose(0, 1) / (1 - p)
        outs.append((torch.softmax(q @ k.transpose(1, 2) * size**-0.5, -1) * keep @ v).transpose(0, 1).flatten(1))
        first += length
    out, expected = attended(ours), torch.cat(outs)
    (out.float() * weight.to(device)).sum().backward()
    (expected * weight).sum().backward()
    assert ours.grad is not None and formula.grad is not None
    pairs = ((out, expected), (ours.grad, formula.grad))
    error = max(float((found.detach().double().cpu() - wanted.detach()).norm() / wanted.detach().norm()) for found, wanted in pairs)
    _require(error < (0.03 if device.type == "cuda" else 1e-5), f"attention with dropped weights differs by {error:.2g} from the formula")
    places = sum(length**2 for length in batch.lengths) * heads
    share = 1 - float(kept.sum()) / places
    _require(abs(share - p) < 0.03, f"dropout of attention of {p} dropped {share:.3f} of the weights")
    return Row(f"gate: attention dropout ({'varlen' if where.varlen else 'padded'} {str(dtype)[6:]})", error, "error")


def norm_gate(device: torch.device, rows: int = 100) -> Row:
    """Return relative difference of the norm of a fused layer with dropout, forward and backward, and of the formula in float64 with the same dropped.

    Where there are no such kernels there is nothing to compare.
    """
    width, p, dtype = 768, 0.125, torch.bfloat16
    generator = torch.Generator().manual_seed(4)
    x, y, grad = (torch.randn(rows, width, generator=generator).to(dtype).to(device) for _ in range(3))
    bias, weight, shift = (torch.randn(width, generator=generator).to(device) for _ in range(3))
    if why_not(device, dtype, width, 12, p):
        return Row("gate: norm of fused layers (not taken here)", 0.0, "error")
    from overnight.models import layer_kernels

    seeds, zero, one = torch.tensor([5], device=device), torch.zeros_like(x), torch.ones(width, device=device)
    keep = layer_kernels.norm(zero, zero, one, one, None, 1.0, p, seeds)[0] != 0
    h, out, stats = layer_kernels.norm(x, y, bias, weight, shift, 1e-12, p, seeds)
    found = [out, *layer_kernels.norm_backward(grad, h, stats, weight, p, seeds)]
    doubles = [tensor.double().requires_grad_() for tensor in (x, y, weight, shift, bias)]
    expected = F.layer_norm(doubles[0] + (doubles[1] + doubles[4]) * keep / (1 - p), (width,), doubles[2], doubles[3], 1e-12)
    dx, dy, *sums = torch.autograd.grad(expected, doubles, grad.double())
    wanted = [expected.detach(), dx, dy, torch.stack(sums)]
    error = max(float((ours.double() - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, wanted, strict=True))
    _require(error < 0.02, f"the norm of fused layers differs by {error:.2g} from the formula")
    share = 1 - float(keep.double().mean())
    _require(abs(share - p) < 0.01, f"dropout of fused layers of {p} dropped {share:.3f} of the elements")
    return Row("gate: norm of fused layers", error, "error")


GATES = (packed_gate, gradient_gate, dropout_gate, norm_gate, precision_gate, lamb_gate)
