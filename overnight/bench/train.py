"""`overnight bench train`: training throughput on full sequences, compared with transformers' BertForPreTraining in the same process.

Both do the same work on the same batch: forward, backward, clipping to norm 1, and an AdamW step, with dropout 0.1.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from overnight.batches.packing import Batch
from overnight.bench.measure import Row, measure, print_result, rate_row
from overnight.bench.sizes import MODELS, VOCABULARY, full_batch, sequence_flops
from overnight.config import AdamWConfig, BertConfig
from overnight.engine.loop import clip
from overnight.errors import UserError
from overnight.models.bert import BertForPretraining
from overnight.optim.groups import build_optimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One row: a model on full sequences of one length."""

    model: str
    length: int
    sequences: int
    precision: str
    repeats: int = 7

    @property
    def name(self) -> str:
        """Of the row."""
        return f"{self.model} {self.length} {self.precision}"


CASES = [
    Case("bert-mini", 128, 32, "fp32"),
    Case("bert-mini", 128, 32, "bf16"),
    Case("bert-base", 128, 8, "fp32", 3),
    Case("bert-base", 128, 8, "bf16", 3),
]
TINY = [Case("bert-tiny", 32, 4, "fp32", 2), Case("bert-tiny", 32, 4, "bf16", 2)]


def run(peer: str = "transformers", tiny: bool = False) -> None:
    """Measure every case and print the rows, JSON last.

    Args:
        peer: `transformers` or `none`.
        tiny: the smallest sizes.
    """
    rows = []
    for case in TINY if tiny else CASES:
        rows.append(measure_case(case, peer))
        print(describe(rows[-1], MODELS[case.model], case.length), flush=True)
        gc.collect()
    print_result("train", rows)


def measure_case(case: Case, peer: str) -> Row:
    """Return the throughput of one case, in sequences a second."""
    model, batch = MODELS[case.model], full_batch(case.sequences, case.length, round(0.15 * case.length))
    functions: dict[str, Callable[[], object]] = {"overnight": our_step(model, batch, DTYPES[case.precision])}
    if peer == "transformers":
        functions[peer] = transformers_step(model, batch, case.precision)
    times = measure(functions, warmup=2, repeats=case.repeats)
    if peer == "transformers":
        return rate_row(case.name, "sequences/s", case.sequences, times["overnight"], peer, times[peer])
    return rate_row(case.name, "sequences/s", case.sequences, times["overnight"])


def describe(row: Row, model: BertConfig, length: int) -> str:
    """Return a row as a line to read."""
    gflops = row.value * sequence_flops(model, length) / 1e9
    text = f"{row.name:24} {row.value:8.2f} sequences/s  ({gflops:,.0f} GFLOP/s)"
    return text if row.ratio is None else f"{text}  {row.peer} {row.peer_value:.2f}  ratio {row.ratio:.2f}"


def our_step(model: BertConfig, batch: Batch, dtype: torch.dtype) -> Callable[[], object]:
    """Return one optimizer step of ours on a batch."""
    torch.manual_seed(0)
    net = BertForPretraining(model, VOCABULARY)
    parameters = list(net.parameters())
    optimizer = build_optimizer(net, AdamWConfig(lr=1e-4))
    predicted, sequences = len(batch.targets["mlm"]), len(batch.lengths)

    def step() -> None:
        losses, _ = net.losses(batch, dtype)
        (losses["mlm"] / predicted + losses["nsp"] / sequences).backward()
        clip(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformers_step(model: BertConfig, batch: Batch, precision: str) -> Callable[[], object]:
    """Return the same step by transformers' BertForPreTraining, with autocast for bf16, and torch's fused AdamW.

    Raises:
        UserError: where transformers is not installed.
    """
    try:
        from transformers import BertConfig, BertForPreTraining
    except ImportError:
        raise UserError(
            "--peer transformers needs the extra `transformers`: pip install 'overnight[transformers]', or --peer none"
        ) from None
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        intermediate_size=model.intermediate_size or 4 * model.hidden_size,
        max_position_embeddings=model.max_position_embeddings,
    )
    net: Any = BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    shape = (len(batch.lengths), batch.lengths[0])
    labels = torch.full_like(batch.ids_N, -100)
    assert batch.predicted_M is not None
    labels[batch.predicted_M] = batch.targets["mlm"]
    inputs = {
        "input_ids": batch.ids_N.view(shape),
        "token_type_ids": batch.segments_N.view(shape),
        "labels": labels.view(shape),
        "next_sentence_label": batch.targets["nsp"],
    }

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = net(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
