"""`overnight bench gpu`: what one GPU does, in under nine minutes, with nothing but the repository and torch.

Gates first (does it compute the right thing: overnight/bench/gates.py), then the machine's two ceilings, then training and the optimizer against them.
What does not fit into memory is left out, and says so. On a machine without a GPU it runs the same code at the smallest sizes on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from overnight.batches.packing import Batch
from overnight.bench import optim
from overnight.bench.gates import GATES
from overnight.bench.measure import Row, measure, print_result, rate_row, result, time_row
from overnight.bench.sizes import (
    MODELS,
    MODERN_MODELS,
    VOCABULARY,
    fitting,
    full_batch,
    sequence_flops,
    set_up_layers,
    sixteen_bits,
)
from overnight.config import LambConfig, MuonConfig
from overnight.engine.precision import DTYPES, multiplies_in_8_bits, to_fp8
from overnight.models.encoders import MaskedLM, masked_lm
from overnight.models.weight_copies import kept_copies
from overnight.optim.batch import why_lists
from overnight.optim.groups import build_optimizer
from overnight.run_dir.atomic import write_json

# No case is begun after this many seconds: each takes a minute with its compilation.
BUDGET_S = 450


@dataclass(frozen=True)
class Case:
    """Training of one model: on full sequences, or on such as come from text, of all lengths up to the longest."""

    model: str
    length: int
    sequences: int
    attention_dropout: float = 0.0
    mean: int = 0
    """Mean length (tokens); 0: all are full."""
    precision: str = "bf16"
    """bf16: the 16 bits that the GPU trains in."""

    @property
    def name(self) -> str:
        """Of the row."""
        mean = f" mean {self.mean}" if self.mean else ""
        return f"{self.model} {self.length}{mean} {self.precision}" + (
            f" attention dropout {self.attention_dropout}" if self.attention_dropout else ""
        )


# The sizes of the published recipes, and what these train with: dropout of attention.
CASES = [
    Case("bert-large", 128, 128, 0.1),
    Case("bert-base", 128, 256, 0.1),
    Case("bert-large", 512, 64, 0.1, mean=250),
    Case("bert-large", 512, 32, 0.1),
    Case("bert-base", 512, 64, 0.1),
    Case("night-gpu", 128, 256),
    Case("night-gpu", 512, 64, mean=250),
    Case("bert-large", 128, 128),
    Case("bert-base", 128, 256),
    Case("bert-large", 128, 128, precision="fp8"),
]
TINY = [Case("bert-tiny", 32, 4), Case("bert-tiny", 32, 4, 0.1), Case("bert-tiny", 32, 4, 0.1, mean=20), Case("modernbert-tiny", 32, 4)]
# The byte model as published: windows of 256 bytes of 256 streams.
BYTES = (4096, 256, 256, "bf16", 10)
# Micro-batches of a step: the optimizer's part of it is that of a large batch, not of a small one.
ACCUMULATED = 8


def run(tiny: bool = False, file: Path | None = None) -> None:
    """Run the gates and every measurement, and print the rows, JSON last, whatever happens on the way.

    Args:
        file: where the JSON is also written, after every row.
    """
    start = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tiny, precision = tiny or device.type == "cpu", sixteen_bits(device)
    rows: list[Row] = []

    def add(*new: Row) -> None:
        for row in new:
            rows.append(row)
            against = f"  {row.peer} {row.peer_value:.4g} {row.unit}  ratio {row.ratio:.2f}" if row.ratio else ""
            print(f"{time.monotonic() - start:5.0f} s  {row.name:48} {row.value:12.4g} {row.unit}{against}", flush=True)
            if file:
                write_json(file, result("gpu", rows))

    try:
        for gate in GATES:
            add(gate(device))
        peak, bandwidth = ceilings(device, tiny)
        add(peak, bandwidth)
        if why := why_lists(device):
            print(f"left out: optimizers, since {why}", flush=True)
        for name in [] if why else ["bert-tiny"] if tiny else ["bert-base", "bert-large"]:
            add(*fitting(f"optimizers of {name}", device, partial(optim.measure_case, name, device, repeats=2 if tiny else 15)))
        for given in TINY if tiny else CASES:
            case = given if given.precision == "fp8" else replace(given, precision=precision)
            if why := _why_no_8_bits(device) if case.precision == "fp8" else "":
                print(f"left out: {case.name}, since {why}", flush=True)
                continue
            if time.monotonic() - start > BUDGET_S:
                print(f"left out, for time: {case.name}", flush=True)
                continue
            add(*fitting(case.name, device, partial(train_rows, case, peak.value, device, tiny)))
        add(*fitting("mLSTM", device, partial(byte_rows, (32, 4, 8, "bf16", 2) if tiny else BYTES, peak.value, device)))
    finally:
        print_result("gpu", rows)


def _why_no_8_bits(device: torch.device) -> str:
    if not multiplies_in_8_bits(device):
        return "the device multiplies in 16 bits at least"
    return "" if find_spec("torchao") else "torchao is not installed"


def _sync(device: torch.device) -> Callable[[], object]:
    return torch.cuda.synchronize if device.type == "cuda" else (lambda: None)


def copied(device: torch.device) -> int:
    """Return how many fp32 numbers the ceiling of a copy copies: 4.3 GB, or on a smaller GPU what takes half of its free memory, there and back."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 40
    return min(1 << 30, free // 16)


def ceilings(device: torch.device, tiny: bool) -> tuple[Row, Row]:
    """Return what the machine gives at most: matrix products of random data in 16 bits (TFLOP/s), and a large copy (GB/s read and written)."""
    n, precision = 256 if tiny else 8192, sixteen_bits(device)
    a, b = (torch.randn(n, n, device=device, dtype=DTYPES[precision]) for _ in range(2))
    x = torch.randn((1 << 20) if tiny else copied(device), device=device)
    y = torch.empty_like(x)
    times = measure({"product": lambda: a @ b, "copy": lambda: y.copy_(x)}, warmup=3, repeats=3 if tiny else 15, sync=_sync(device))
    return (
        rate_row(f"ceiling: {precision} product", "TFLOP/s", 2 * n**3 / 1e12, times["product"]),
        rate_row("ceiling: copy", "GB/s", 2 * x.nbytes / 1e9, times["copy"]),
    )


def given_batch(case: Case) -> Batch:
    """Return the random micro-batch of a case."""
    predicted = round(0.15 * case.length)
    if not case.mean:
        return full_batch(case.sequences, case.length, predicted)
    # A quarter of them full, the others as long as the mean asks for.
    full, total = case.sequences // 4, case.sequences * case.mean
    each, more = divmod(total - full * case.length, case.sequences - full)
    lengths = [case.length] * full + [each + (at < more) for at in range(case.sequences - full)]
    whole = full_batch(1, total, max(1, round(0.15 * total)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    targets = {**whole.targets, "nsp": torch.zeros(len(lengths), dtype=torch.int64)}
    return replace(
        whole, positions_N=positions, segments_N=torch.zeros_like(positions), starts=starts, lengths=tuple(lengths), targets=targets
    )


def train_rows(case: Case, peak: float, device: torch.device, tiny: bool) -> list[Row]:
    """Return sequences a second, share of the measured matrix peak, and peak memory of whole steps as the recipes take them: of BERT with LAMB, of ModernBERT with Muon."""
    dtype, is_bert, in_8_bits = DTYPES[case.precision], case.model in MODELS, case.precision == "fp8"
    model = replace(MODELS[case.model], attention_dropout=case.attention_dropout) if is_bert else MODERN_MODELS[case.model]
    torch.manual_seed(0)
    net = masked_lm(model, VOCABULARY, nsp=is_bert).to(device)
    batch, accumulated = given_batch(case), 2 if tiny else ACCUMULATED
    lengths, batch = batch.lengths, batch.to(device)
    optim = LambConfig() if is_bert else MuonConfig()
    optimizer, targets = build_optimizer(net, optim), {"mlm": len(batch.targets["mlm"]), "nsp": case.sequences}
    if in_8_bits:
        to_fp8(net, device)
    if not tiny:
        set_up_layers(net.encoder, device, dtype, fuses=not in_8_bits)

    def step() -> None:
        with kept_copies():
            for _ in range(accumulated):
                found, _ = net.losses(batch, dtype)
                torch.stack([loss / targets[name] for name, loss in found.items()]).sum().backward()
        if not is_bert:  # LAMB clips by itself
            torch.nn.utils.clip_grad_norm_(net.parameters(), optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timing = measure({"step": step}, warmup=3, repeats=3 if tiny else 10, sync=_sync(device))["step"]
    row = rate_row(case.name, "sequences/s", case.sequences * accumulated, timing)
    tflops = row.value * sum(sequence_flops(model, length) for length in lengths) / len(lengths) / 1e12
    rows = [row, Row(f"{case.name}, of the product ceiling", 100 * tflops / peak, "%")]
    if device.type == "cuda":
        rows.append(Row(f"{case.name}, peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB"))
    rows.append(head_row(case, net, batch, device))
    return rows


def byte_rows(sizes: tuple[int, int, int, str, int], peak: float, device: torch.device) -> list[Row]:
    """Return characters a second of forward and backward passes of an mLSTM, and their share of the measured matrix peak; none without what byte models need."""
    try:
        from overnight.bench import mlstm
    except ImportError as error:
        print(f"left out: mLSTM ({error})", flush=True)
        return []
    case = replace(mlstm.Case(*sizes), precision=sixteen_bits(device))
    batch = mlstm.window(case).to(device)
    timing = measure({"step": mlstm.our_step("mlstm", case, batch)}, warmup=3, repeats=case.repeats, sync=_sync(device))["step"]
    row = rate_row(f"mLSTM {case.name}", "characters/s", case.rows * case.steps, timing)
    return [row, Row(f"mLSTM {case.name}, of the product ceiling", 100 * row.value * mlstm.flops(case) / 1e12 / peak, "%")]


def head_row(case: Case, net: MaskedLM, batch: Batch, device: torch.device) -> Row:
    """Return the vocabulary head alone, forward: at the predicted positions, and at all as the peer."""
    hidden = torch.randn(len(batch.ids_N), net.encoder.norm.weight.numel(), device=device, dtype=DTYPES[case.precision])
    some = hidden[: len(batch.targets["mlm"])].contiguous()

    def head(x: torch.Tensor) -> None:
        with torch.no_grad():
            F.linear(net.mlm(x), net.encoder.word.weight.to(x.dtype))

    times = measure({"some": lambda: head(some), "all": lambda: head(hidden)}, warmup=1, repeats=3, sync=_sync(device))
    return time_row(f"{case.name}, vocabulary head", times["some"], "all positions", times["all"])
