"""The kernels of layer_kernels.py interpreted in numpy, for tests/models/test_layer_kernels.py: `python -m tests.models.layer_kernels_worker interpret FILE`.

TRITON_INTERPRET must be set before Triton is imported, so this is a process of its own.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overnight.batches.packing import Batch
from overnight.bench import gates
from overnight.config import BertConfig
from overnight.models import fused_layer, vocabulary_loss
from overnight.models.attention import Layout
from overnight.models.bert import Encoder, Layer
from tests.models.sample import pretraining, random_batch

LENGTHS, WIDTH, INNER, HEADS, P = (5, 1, 9, 4), 24, 264, 2, 0.25
"""No width is a power of two, rows and columns are no multiple of a program's."""
SEEDS = (3, 2**61 + 5)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def drawn(*shape: int, seed: int) -> Tensor:
    """Random numbers, fp32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def given() -> dict[str, Tensor]:
    """What the kernels are called with."""
    rows = sum(LENGTHS)
    wide = {name: drawn(rows, WIDTH, seed=i) for i, name in enumerate(("x", "y", "grad", "q", "k", "v"))}
    vectors = {name: drawn(WIDTH, seed=10 + i) for i, name in enumerate(("bias", "weight", "shift"))}
    return {
        **wide,
        **vectors,
        "inner": 2 * drawn(rows, INNER, seed=20),
        "inner grad": drawn(rows, INNER, seed=21),
        "inner bias": drawn(INNER, seed=22),
    }


def kept(seeds: Tensor, which: int, dtype: torch.dtype) -> Tensor:
    """Which elements dropout keeps, of P."""
    from overnight.models import layer_kernels as ours

    zero, one = torch.zeros(sum(LENGTHS), WIDTH, dtype=dtype), torch.ones(WIDTH)
    return ours.norm(zero, zero, one, one, None, 1.0, P, seeds, which)[0] != 0


def kernels(dtype: torch.dtype) -> dict[str, Any]:
    """What each kernel computes, with dropout and without, with all that is added and without."""
    from overnight.models import layer_kernels as ours

    g, seeds = {name: x if x.ndim == 1 else x.to(dtype) for name, x in given().items()}, torch.tensor(SEEDS)
    found: dict[str, Any] = {}
    for name, p in (("norm", 0.0), ("norm dropped", P)):
        h, out, stats = ours.norm(g["x"], g["y"], g["bias"], g["weight"], g["shift"], 1e-5, p, seeds, 1)
        found[name] = (h, out, *ours.norm_backward(g["grad"], h, stats, g["weight"], p, seeds, 1))
    found["bare norm"] = ours.norm(None, g["y"], None, g["weight"], None, 1e-5)[1]
    found["kept"], found["kept by another"] = (kept(seeds, which, dtype) for which in (1, 0))
    many, wide = torch.zeros(16, 4096), torch.ones(4096)
    found["share kept"] = (ours.norm(many, many, wide, wide, None, 1.0, P, seeds, 0)[0] != 0).float().mean()
    found["gelu"] = ours.gelu(g["inner"], g["inner bias"])
    found["gelu backward"] = ours.gelu_backward(g["inner grad"].clone(), g["inner"], g["inner bias"])
    found["joined"] = ours.joined(*(g[name].view(-1, HEADS, WIDTH // HEADS) for name in "qkv"))
    return found


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention within the sequences, (N, H, E)."""
    outs, first = [], 0
    for length in LENGTHS:
        a, b, c = (x[first : first + length].transpose(0, 1) for x in (q, k, v))
        outs.append((torch.softmax(a @ b.transpose(1, 2) * q.shape[-1] ** -0.5, -1) @ c).transpose(0, 1))
        first += length
    return torch.cat(outs)


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradients of :func:`reference`."""
    parts = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        return torch.autograd.grad(reference(*parts), parts, grad)


def network(p: float) -> Layer:
    """A layer with parameters that matter."""
    torch.manual_seed(5)
    layer = Layer(BertConfig(num_layers=1, hidden_size=WIDTH, num_heads=HEADS, intermediate_size=INNER, dropout=p, attention_dropout=0.0))
    with torch.no_grad():
        for tensor in layer.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.3)
    return layer


def layer(dtype: torch.dtype) -> dict[str, Any]:
    """A fused layer, forward and backward, with a CPU's reference in the place of the attention kernel."""
    fused_layer.flash = lambda q, k, v, where, p: (reference(q, k, v), q.new_zeros(1), q.new_zeros(1), q.new_zeros(1))  # type: ignore[assignment]
    fused_layer.flash_backward = flash_backward  # type: ignore[assignment]
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    found = {}
    for p in (0.0, P):
        net = network(p)
        net.fused = True
        x = given()["x"].to(dtype).requires_grad_()
        torch.manual_seed(6)
        out = net(x, Layout(starts, max(LENGTHS), True))
        (out.float() * given()["grad"]).sum().backward()
        found[str(p)] = {"out": out.detach(), "x": x.grad, **{name: tensor.grad for name, tensor in net.named_parameters()}}
    torch.manual_seed(6)
    seeds = torch.randint(2**62, (2,))
    return {**found, "kept": [kept(seeds, which, dtype) for which in (0, 1)]}


def outside(dtype: torch.dtype) -> dict[str, Any]:
    """The embeddings and the loss over the vocabulary, with gradients, as the network calls them."""
    from overnight.models import layer_kernels as ours

    batch, net = given_batch(), encoder()
    net.fused = True
    torch.manual_seed(8)
    out = net.embedded(batch, dtype)
    (out.float() * drawn(*out.shape, seed=30)).sum().backward()
    torch.manual_seed(8)
    seeds = torch.randint(2**62, (1,))
    zero, one = torch.zeros(len(batch.ids_N), WIDTH), torch.ones(WIDTH)
    keep = ours.norm(zero, zero, one, one, None, 1.0, P, seeds)[0] != 0
    grads = {name: tensor.grad for name, tensor in net.named_parameters() if tensor.grad is not None}
    x, weight, bias, labels = decoder(dtype)
    loss = vocabulary_loss._VocabularyLossOnGpu.apply(x, weight, bias, labels, None)
    (3 * loss).backward()
    return {"embedded": out.detach(), "kept": keep, **grads, "loss": loss.detach(), "x": x.grad, "decoder": weight.grad, "bias": bias.grad}


def tied() -> dict[str, Tensor]:
    """Gradients of a network without layers: the table of the words is embedding and decoder. Two micro-batches are added up."""
    net, real = pretraining(num_layers=0), (vocabulary_loss.eager_cpu, vocabulary_loss._has_kernel)
    net.encoder.fused = True
    vocabulary_loss.eager_cpu, vocabulary_loss._has_kernel = (lambda x: False), (lambda device: True)  # type: ignore[assignment]
    for seed in (1, 2):
        losses, _ = net.losses(random_batch([7, 12], seed=seed), torch.float32)
        (losses["mlm"] + losses["nsp"]).backward()
    vocabulary_loss.eager_cpu, vocabulary_loss._has_kernel = real
    return {name: tensor.grad for name, tensor in net.named_parameters() if tensor.grad is not None}


def given_batch() -> Batch:
    """Tokens of two segments, some of them several times."""
    batch = random_batch(list(LENGTHS))
    return replace(batch, ids_N=batch.ids_N % 7)


def encoder() -> Encoder:
    """An encoder without layers, whose norm matters."""
    torch.manual_seed(7)
    net = Encoder(BertConfig(num_layers=0, hidden_size=WIDTH, num_heads=HEADS, max_position_embeddings=16, dropout=P), 60)
    with torch.no_grad():
        net.norm.weight.add_(torch.randn(WIDTH) * 0.3), net.norm.bias.add_(torch.randn(WIDTH) * 0.3)
    return net


def decoder(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, bias and labels of a vocabulary of more than a program's block, the last rows of which are padding; one label counts for nothing."""
    x, weight, bias = drawn(5, WIDTH, seed=40).to(dtype), drawn(4160, WIDTH, seed=41), drawn(4160, seed=42)
    bias[4100:] = -1e4
    labels = torch.tensor([0, 4099, -100, 17, 2000])
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


def gate() -> tuple[float, str]:
    """What the gate of `overnight bench gpu` says of the kernels, and of a backward pass that drops others."""
    from overnight.models import layer_kernels as ours

    gates.why_not = lambda *asked: ""  # type: ignore[assignment]
    value, real = gates.norm_gate(torch.device("cpu"), rows=24).value, ours.norm_backward
    ours.norm_backward = lambda grad, h, stats, weight, p, seeds: real(grad, h, stats, weight, p, seeds + 1)  # type: ignore[assignment]
    try:
        gates.norm_gate(torch.device("cpu"), rows=24)
    except AssertionError as error:
        return value, str(error)
    return value, ""


def main() -> None:
    """Write what was asked for."""
    assert sys.argv[1] == "interpret"
    found: dict[str, Any] = {
        name: {"kernels": kernels(dtype), "layer": layer(dtype), "outside": outside(dtype)} for name, dtype in DTYPES.items()
    }
    found["gate"], found["tied"] = gate(), tied()
    torch.save(found, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
