"""`overnight bench gpu`: what one GPU does, in under nine minutes, with nothing but the repository and torch.

Gates first (does it compute the right thing), then the machine's two ceilings, then training and the optimizer against them.
On a machine without a GPU it runs the same code at the smallest sizes on the CPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from overnight.batches.packing import Batch
from overnight.bench import optim
from overnight.bench.measure import Row, measure, print_result, rate_row, time_row
from overnight.bench.sizes import MODELS, VOCABULARY, full_batch, sequence_flops
from overnight.config import BertConfig, LambConfig
from overnight.models import attention as attend
from overnight.models.bert import BertForPretraining
from overnight.optim import Lamb
from overnight.optim.groups import build_optimizer

# No case is begun after this many seconds: each takes a minute with its compilation.
BUDGET_S = 450


@dataclass(frozen=True)
class Case:
    """Training of one model on full sequences."""

    model: str
    length: int
    sequences: int
    attention_dropout: float = 0.0

    @property
    def name(self) -> str:
        """Of the row."""
        return f"{self.model} {self.length} bf16" + (f" attention dropout {self.attention_dropout}" if self.attention_dropout else "")


CASES = [
    Case("bert-large", 128, 128),
    Case("bert-base", 128, 256),
    Case("bert-large", 512, 32),
    Case("bert-base", 512, 64),
    Case("bert-base", 128, 256, 0.1),
]
TINY = [Case("bert-tiny", 32, 4), Case("bert-tiny", 32, 4, 0.1)]


def run(peer: str = "none", tiny: bool = False) -> None:
    """Run the gates and every measurement, and print the rows, JSON last."""
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny = tiny or device.type == "cpu"
    rows: list[Row] = []

    def add(*new: Row) -> None:
        rows.extend(new)
        for row in new:
            against = f"  {row.peer} {row.peer_value:.4g} {row.unit}  ratio {row.ratio:.2f}" if row.ratio else ""
            print(f"{time.monotonic() - start:5.0f} s  {row.name:48} {row.value:12.4g} {row.unit}{against}", flush=True)

    for gate in (packed_gate, precision_gate, lamb_gate):
        add(gate(device))
    peak, bandwidth = ceilings(device, tiny)
    add(peak, bandwidth)
    for name in ["bert-tiny"] if tiny else ["bert-base", "bert-large"]:
        add(*optim.measure_case(name, device, repeats=2 if tiny else 15))
    for case in TINY if tiny else CASES:
        if time.monotonic() - start > BUDGET_S:
            print(f"left out, for time: {case.name}", flush=True)
            continue
        add(*train_rows(case, peak.value, device, tiny))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print_result("gpu", rows)


def _sync(device: torch.device) -> Callable[[], object]:
    return torch.cuda.synchronize if device.type == "cuda" else (lambda: None)


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
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    error = float((_encoded(net, batch, dtype, device) - reference).norm() / reference.norm())
    varlen = attend.layout(batch.to(device), 0.0, dtype).varlen
    _require(error < (0.03 if dtype == torch.bfloat16 else 1e-5), f"the packed encoder differs by {error:.2g} from the reference")
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
    results = []
    for where, dtype in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, 32, generator=generator, dtype=torch.float64).to(where, dtype).requires_grad_()
        optimizer = Lamb([x], lr=0.01, max_grad_norm=1.0)
        for _ in range(10):
            x.grad = torch.randn(64, 32, generator=generator, dtype=torch.float64).to(where, dtype)
            optimizer.step()
        results.append(x.detach().cpu().double())
    error = float((results[0] - results[1]).norm() / results[1].norm())
    _require(error < 1e-5, f"LAMB differs by {error:.2g} from float64")
    return Row("gate: LAMB fp32 against float64", error, "error")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def ceilings(device: torch.device, tiny: bool) -> tuple[Row, Row]:
    """Return what the machine gives at most: bf16 matrix products of random data (TFLOP/s), and a large copy (GB/s read and written)."""
    n = 256 if tiny else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn((1 << 20) if tiny else (1 << 30), device=device)
    y = torch.empty_like(x)
    times = measure({"product": lambda: a @ b, "copy": lambda: y.copy_(x)}, warmup=3, repeats=3 if tiny else 15, sync=_sync(device))
    return (
        rate_row("ceiling: bf16 product", "TFLOP/s", 2 * n**3 / 1e12, times["product"]),
        rate_row("ceiling: copy", "GB/s", 2 * x.nbytes / 1e9, times["copy"]),
    )


def train_rows(case: Case, peak: float, device: torch.device, tiny: bool) -> list[Row]:
    """Return sequences a second, share of the measured matrix peak, and peak memory of whole steps with LAMB."""
    model = replace(MODELS[case.model], attention_dropout=case.attention_dropout)
    torch.manual_seed(0)
    net = BertForPretraining(model, VOCABULARY).to(device)
    batch = full_batch(case.sequences, case.length, round(0.15 * case.length)).to(device)
    parameters = list(net.parameters())
    optimizer = build_optimizer(net, LambConfig())
    if not tiny:
        net.encoder.compile_layers()

    def step() -> None:
        found, _ = net.losses(batch, torch.bfloat16)
        (found["mlm"] / len(batch.targets["mlm"]) + found["nsp"] / case.sequences).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timing = measure({"step": step}, warmup=3, repeats=3 if tiny else 15, sync=_sync(device))["step"]
    row = rate_row(case.name, "sequences/s", case.sequences, timing)
    tflops = row.value * sequence_flops(model, case.length) / 1e12
    rows = [row, Row(f"{case.name}, of the product ceiling", 100 * tflops / peak, "%")]
    if device.type == "cuda":
        rows.append(Row(f"{case.name}, peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB"))
    rows.append(head_row(case, net, batch, device, tiny))
    return rows


def head_row(case: Case, net: BertForPretraining, batch: Batch, device: torch.device, tiny: bool) -> Row:
    """Return the vocabulary head alone, forward: at the predicted positions, and at all as the peer."""
    hidden = torch.randn(len(batch.ids_N), net.encoder.norm.weight.numel(), device=device, dtype=torch.bfloat16)
    some = hidden[: len(batch.targets["mlm"])].contiguous()

    def head(x: torch.Tensor) -> None:
        with torch.no_grad():
            F.linear(net.mlm(x), net.encoder.word.weight.to(x.dtype))

    times = measure({"some": lambda: head(some), "all": lambda: head(hidden)}, warmup=1, repeats=3, sync=_sync(device))
    return time_row(f"{case.name}, vocabulary head", "ms", times["some"], "all positions", times["all"])
