"""`overnight bench roof`: what this machine's matrix products and memory sustain, the least time of training that follows, and the measured time, by component.

The JSON (`--json FILE`) is what `overnight plan RECIPE --roof FILE` reads. `--table` prints the least times on known GPUs instead, from data sheets; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from overnight.batches.packing import Batch, Sizes
from overnight.bench.measure import Row, Timing, measure, print_result, rate_row, result, time_row
from overnight.bench.sizes import MODELS, VOCABULARY, fitting, full_batch, set_up_layers, sixteen_bits
from overnight.config import BertConfig, LambConfig
from overnight.engine.precision import DTYPES, set_matmul_precision
from overnight.errors import ConfigError
from overnight.machine import keep_freed_memory, use_large_pages
from overnight.models.attention import attention, layout
from overnight.models.bert import BertForPretraining
from overnight.models.layers import linear
from overnight.models.roofline import Rates, micro_batch, optimizer_step, table
from overnight.models.vocabulary_loss import vocabulary_loss
from overnight.optim.groups import build_optimizer
from overnight.run_dir.atomic import write_json

# Width of the matrices whose product, eight times, keeps a GPU busy while the host asks for a part of a step: 12 ms of an H100.
_OTHER_WORK = 8192


@dataclass(frozen=True)
class Case:
    """What is measured on a kind of machine."""

    model: str
    sequences: int
    length: int
    copied: int
    """fp32 numbers that are copied, or added on a CPU; more than a cache holds."""
    repeats: int


GPU, CPU, TINY = Case("bert-large", 128, 128, 1 << 28, 15), Case("bert-mini", 16, 128, 1 << 25, 9), Case("bert-tiny", 4, 32, 1 << 20, 3)


def run(tiny: bool = False, file: Path | None = None, precision: str = "", table_only: bool = False) -> None:
    """Measure and print the rows, JSON last; fewer sequences where they do not fit into memory.

    Args:
        file: where the JSON is also written.
        precision: of products and activations, as a recipe has it; empty: of 16 bits on a GPU, fp32 on a CPU.
        table_only: print the table of GPUs instead.

    Raises:
        ConfigError: for a file to write the table to, or a precision of it.
    """
    if table_only:
        if file:
            raise ConfigError("--json: has no measurement to write with --table; leave one of them out")
        if precision:
            raise ConfigError("--precision: the table is that of bf16; leave it out, or --table")
        print(table({name.removeprefix("bert-"): MODELS[name] for name in ("bert-base", "bert-large")}, VOCABULARY))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = TINY if tiny else GPU if device.type == "cuda" else CPU
    if device.type == "cpu":  # as a run does, whose time is told by this
        use_large_pages()
        keep_freed_memory()
    precision = precision or (sixteen_bits(device) if device.type == "cuda" else "fp32")
    set_matmul_precision(precision, device)
    while not (rows := fitting(f"{case.sequences} sequences", device, partial(measured, case, device, precision))) and case.sequences > 1:
        case = replace(case, sequences=case.sequences // 2)
    for row in rows:
        against = f"  {row.peer} {row.peer_value:.4g} {row.unit}  ratio {row.ratio:.2f}" if row.ratio else ""
        print(f"{row.name:40} {row.value:10.4g} {row.unit}{against}")
    try:
        if file:
            write_json(file, result("roof", rows))
    finally:  # also where it cannot be written
        print_result("roof", rows)


def measured(case: Case, device: torch.device, precision: str) -> list[Row]:
    """Return the two rates, and the times of the components of a micro-batch and of LAMB's step beside the least."""
    model, dtype = MODELS[case.model], DTYPES[precision]
    batch = full_batch(case.sequences, case.length, round(0.15 * case.length)).to(device)
    torch.manual_seed(0)
    net = BertForPretraining(model, VOCABULARY).to(device).train()
    set_up_layers(net.encoder, device, dtype)
    sync = torch.cuda.synchronize if device.type == "cuda" else None
    shapes = product_shapes(model, batch)
    products = {name: product(*shape, device, dtype) for name, shape in shapes.items()}
    x, y = (torch.randn(case.copied, device=device) for _ in range(2))
    # A CPU reads what it is about to overwrite, which a copy's count leaves out: there y + x into y, as in `overnight bench optim`.
    moved, passes, move = ("copy", 2, lambda: y.copy_(x)) if device.type == "cuda" else ("memory", 3, lambda: y.add_(x))
    ceilings = measure({**products, moved: move}, warmup=2, repeats=case.repeats, sync=sync)
    of_layers = [name for name in shapes if name != "head"]
    flops = sum(6 * a * b * c for a, b, c in (shapes[name] for name in of_layers))
    in_layers = _sum([ceilings[name] for name in of_layers])
    rates = Rates(flops / in_layers.median, passes * x.nbytes / ceilings[moved].median)
    rows = [
        rate_row(f"product {name} {n} x {i} x {o}", "TFLOP/s", 6 * n * i * o / 1e12, ceilings[name]) for name, (n, i, o) in shapes.items()
    ]
    rows.append(rate_row(f"products {precision}", "TFLOP/s", flops / 1e12, in_layers))
    rows.append(rate_row(moved, "GB/s", passes * x.nbytes / 1e9, ceilings[moved]))
    optimizer = build_optimizer(net, LambConfig())
    of_step = parts(net, model, batch, dtype)
    if device.type == "cuda":
        times = {name: on_gpu(part, device, case.repeats, dtype) for name, part in {**of_step, "optimizer": optimizer.step}.items()}
    else:
        times = measure(of_step, warmup=2, repeats=case.repeats) | measure({"optimizer": optimizer.step}, warmup=2, repeats=case.repeats)
    return rows + against_floor(case, model, rates, in_layers, times, dtype.itemsize)


def on_gpu(part: Callable[[], object], device: torch.device, repeats: int, dtype: torch.dtype) -> Timing:
    """Time what a part of a step takes the GPU alone: it is asked for while the GPU is busy with other work, so that the GPU never waits for the host.

    An H100 does the attention of a layer in less time than it takes to ask for it.
    """
    other, seconds = torch.randn(_OTHER_WORK, _OTHER_WORK, device=device).to(dtype), []
    for number in range(-2, repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(8):
            torch.mm(other, other)
        begin.record()
        part()
        end.record()
        torch.cuda.synchronize(device)
        if number >= 0:
            seconds.append(begin.elapsed_time(end) / 1e3)
    return Timing(tuple(seconds))


def against_floor(case: Case, model: BertConfig, rates: Rates, products: Timing, times: dict[str, Timing], element: int) -> list[Row]:
    """Return the rows of measured times beside the least."""
    tokens, layers = case.sequences * case.length, model.num_layers
    sizes = Sizes(tokens, tokens * case.length, case.sequences * round(0.15 * case.length), case.sequences)
    least = {part.name: 1e3 * part.seconds(rates) for part in micro_batch(model, VOCABULARY, sizes, element)}
    last = {part.name: 1e3 * part.seconds(rates) for part in optimizer_step(model, VOCABULARY, 1, element, "lamb")}
    between = (times["layer"].median - times["attention"].median - products.median) * layers * 1e3
    found = [
        ("attention", times["attention"].median * layers * 1e3, least["attention"]),
        ("products of the layers", products.median * layers * 1e3, least["products of the layers"]),
        ("norms, GELU, dropout", between, least["norms, GELU, dropout"]),
        ("vocabulary head and loss", times["vocabulary"].median * 1e3, least["vocabulary head"] + least["loss"]),
        ("embeddings", times["embeddings"].median * 1e3, least["embeddings"]),
    ]
    # What is left of a layer is a difference of medians: on a busy machine nothing may be left of it.
    rows = [Row(name, value, "ms", None, "floor", floor) for name, value, floor in found if value > 0]
    for name, floor in (("micro-batch", sum(least.values())), ("optimizer", last["optimizer"])):
        row = time_row(name, times[name])
        rows += [Row(name, row.value, "ms", row.spread, "floor", floor), Row(f"{name}, share of the floor", 100 * floor / row.value, "%")]
    return rows


def _sum(timings: list[Timing]) -> Timing:
    return Timing(tuple(map(sum, zip(*(timing.seconds for timing in timings), strict=True))))


def product_shapes(model: BertConfig, batch: Batch) -> dict[str, tuple[int, int, int]]:
    """Return rows, inner and outer dimension of the linear maps of a layer and of the vocabulary head."""
    n, h, ff = len(batch.ids_N), model.hidden_size, model.intermediate_size or 4 * model.hidden_size
    rows = -(-VOCABULARY // 64) * 64
    return {"qkv": (n, h, 3 * h), "out": (n, h, h), "up": (n, h, ff), "down": (n, ff, h), "head": (len(batch.targets["mlm"]), h, rows)}


def product(rows: int, inner: int, outer: int, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return what computes the three products of a linear map, forward and backward: on a CPU as training does, where plain ones may take longer."""
    x, w, grad = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, inner), (outer, inner), (rows, outer)))

    def products() -> object:
        return x @ w.t(), grad @ w, grad.t() @ x

    if device.type != "cpu":
        return products
    x, w, bias = x.requires_grad_(), w.requires_grad_(), torch.zeros(outer, dtype=dtype)

    def as_trained() -> None:
        x.grad = w.grad = None
        linear(x, w, bias).backward(grad)

    return as_trained


def parts(net: BertForPretraining, model: BertConfig, batch: Batch, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return forward and backward passes of parts of a network, and of a whole micro-batch."""
    device, h = batch.ids_N.device, model.hidden_size
    n, m = len(batch.ids_N), len(batch.targets["mlm"])
    where = layout(batch, model.attention_dropout, dtype, size=h // model.num_heads)
    qkv, hidden, chosen = (torch.randn(*shape, device=device).to(dtype).requires_grad_() for shape in ((n, 3 * h), (n, h), (m, h)))
    grad, weight = torch.randn(n, h, device=device).to(dtype), net.encoder.word.weight

    def back(out: Tensor, given: Tensor | None = None) -> None:
        for x in (*net.parameters(), qkv, hidden, chosen):
            x.grad = None
        out.backward(given)

    return {
        "attention": lambda: back(attention(qkv, model.num_heads, where, model.attention_dropout), grad),
        "layer": lambda: back(net.encoder.layers[0](hidden, where), grad),
        "vocabulary": lambda: back(vocabulary_loss(chosen, weight, net.mlm.masked_bias(), batch.targets["mlm"], False)[0]),
        "embeddings": lambda: back(net.encoder.embedded(batch, dtype), grad),
        # Last, since the optimizer steps on its gradients.
        "micro-batch": lambda: back(torch.stack(list(net.losses(batch, dtype)[0].values())).sum()),
    }
