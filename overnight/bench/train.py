"""`overnight bench train`: training throughput, compared with transformers' BertForPreTraining and ModernBertForMaskedLM in the same process.

Both do the same work on the same batch: forward, backward, clipping to norm 1, and an AdamW step, BERT with dropout 0.1. Of ModernBERT the peer too
computes the logits of the predicted tokens only (`sparse_prediction`). Sequences of natural lengths are padded to the longest of them for the peer,
with an attention mask, as its data collators do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from overnight.batches.packing import Batch
from overnight.bench.measure import Row, measure, printed, rate_row
from overnight.bench.sizes import (
    DTYPES,
    MODELS,
    MODERN_MODELS,
    REVIEW_LENGTHS,
    VOCABULARY,
    full_batch,
    natural_batch,
    not_emulated,
    sequence_flops,
)
from overnight.config import AdamWConfig, EncoderConfig, ModernBertConfig
from overnight.engine.loop import clip
from overnight.errors import UserError
from overnight.machine import keep_freed_memory, use_large_pages
from overnight.models.encoders import masked_lm
from overnight.models.modernbert import inner_size
from overnight.optim.groups import build_optimizer


@dataclass(frozen=True)
class Case:
    """One row: a model on full sequences of one length, or on such as come from text, of all lengths up to the longest."""

    model: str
    length: int
    sequences: int
    precision: str
    repeats: int = 7
    natural: bool = False

    @property
    def name(self) -> str:
        """Of the row."""
        return f"{self.model} {'up to ' * self.natural}{self.length} {self.precision}"

    def batch(self) -> Batch:
        """Return what is trained on; natural lengths are those of film reviews, which of shorter sequences all shrink alike."""
        if not self.natural:
            return full_batch(self.sequences, self.length, round(0.15 * self.length))
        return natural_batch([max(3, at * self.length // 512) for at in REVIEW_LENGTHS[: self.sequences]])


CASES = [
    Case("bert-mini", 128, 32, "fp32"),
    Case("bert-mini", 128, 32, "bf16"),
    Case("bert-mini", 512, 16, "fp32", natural=True),
    Case("bert-mini", 512, 16, "bf16", natural=True),
    Case("modernbert-mini", 128, 32, "fp32"),
    Case("modernbert-mini", 128, 32, "bf16"),
    Case("bert-base", 128, 8, "fp32", 3),
    Case("bert-base", 128, 8, "bf16", 3),
]
TINY = [Case(f"{kind}-tiny", 32, 4, precision, 2) for kind in ("bert", "modernbert") for precision in ("fp32", "bf16")]
TINY.append(Case("bert-tiny", 32, 4, "fp32", 2, natural=True))
NETWORKS: dict[str, EncoderConfig] = {**MODELS, **MODERN_MODELS}


def run(peer: str = "transformers", tiny: bool = False) -> None:
    """Measure every case and print the rows, JSON last.

    Args:
        peer: `transformers` or `none`.
        tiny: the smallest sizes.
    """
    # As a run on a CPU does; the peer, in the same process, gains as much.
    use_large_pages()
    keep_freed_memory()
    cases = TINY if tiny else not_emulated(CASES, lambda case: case.precision)
    with printed("train") as rows:
        for case in cases:
            rows.append(measure_case(case, peer))
            print(describe(rows[-1], NETWORKS[case.model], case.batch().lengths), flush=True)
            gc.collect()


def measure_case(case: Case, peer: str) -> Row:
    """Return the throughput of one case, in sequences a second."""
    model, batch = NETWORKS[case.model], case.batch()
    if isinstance(model, ModernBertConfig):  # as published, without next-sentence prediction
        batch = replace(batch, targets={"mlm": batch.targets["mlm"]})
    functions: dict[str, Callable[[], object]] = {"overnight": our_step(model, batch, DTYPES[case.precision])}
    if peer == "transformers":
        functions[peer] = transformers_step(model, batch, case.precision)
    times = measure(functions, warmup=2, repeats=case.repeats)
    if peer == "transformers":
        return rate_row(case.name, "sequences/s", case.sequences, times["overnight"], peer, times[peer])
    return rate_row(case.name, "sequences/s", case.sequences, times["overnight"])


def describe(row: Row, model: EncoderConfig, lengths: Sequence[int]) -> str:
    """Return a row as a line to read; operations are those of its sequences, not of padding."""
    gflops = row.value * sum(sequence_flops(model, length) for length in lengths) / len(lengths) / 1e9
    text = f"{row.name:25} {row.value:8.2f} sequences/s  ({gflops:,.0f} GFLOP/s)"
    return text if row.ratio is None else f"{text}  {row.peer} {row.peer_value:.2f}  ratio {row.ratio:.2f}"


def our_step(model: EncoderConfig, batch: Batch, dtype: torch.dtype) -> Callable[[], object]:
    """Return one optimizer step of ours on a batch."""
    torch.manual_seed(0)
    net = masked_lm(model, VOCABULARY)
    parameters = list(net.parameters())
    optimizer = build_optimizer(net, AdamWConfig(lr=1e-4))
    counts = {"mlm": len(batch.targets["mlm"]), "nsp": len(batch.lengths)}

    def step() -> None:
        losses, _ = net.losses(batch, dtype)
        torch.stack([loss / counts[name] for name, loss in losses.items()]).sum().backward()
        clip(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformers_step(model: EncoderConfig, batch: Batch, precision: str) -> Callable[[], object]:
    """Return the same step by transformers, with autocast for bf16, and torch's fused AdamW.

    Raises:
        UserError: where transformers is not installed.
    """
    net = _their_network(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    inputs = padded_inputs(batch)
    if isinstance(model, ModernBertConfig):
        del inputs["token_type_ids"]
    else:
        inputs["next_sentence_label"] = batch.targets["nsp"]

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = net(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def padded_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return a batch as transformers takes it: (S, T) each, padded to the longest, with a mask where there is padding."""
    labels = torch.full_like(batch.ids_N, -100)
    assert batch.predicted_M is not None
    labels[batch.predicted_M] = batch.targets["mlm"]
    flat = {"input_ids": batch.ids_N, "token_type_ids": batch.segments_N, "attention_mask": torch.ones_like(batch.ids_N), "labels": labels}
    if min(batch.lengths) == max(batch.lengths):
        del flat["attention_mask"]
    rows = {name: torch.nn.utils.rnn.pad_sequence(x.split(batch.lengths), batch_first=True) for name, x in flat.items() if name != "labels"}
    return rows | {"labels": torch.nn.utils.rnn.pad_sequence(labels.split(batch.lengths), batch_first=True, padding_value=-100)}


def _their_network(model: EncoderConfig) -> Any:
    """Return transformers' network of the same sizes, to train."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "--peer transformers needs the extra `transformers`: pip install 'overnight[transformers]', or --peer none"
        ) from None
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "max_position_embeddings": model.max_position_embeddings,
    }
    if not isinstance(model, ModernBertConfig):
        sizes["intermediate_size"] = model.intermediate_size or 4 * model.hidden_size
        return transformers.BertForPreTraining(transformers.BertConfig(**sizes)).train()
    assert not model.local_attention
    sizes |= dict.fromkeys((f"{name}_token_id" for name in ("pad", "cls", "sep", "bos", "eos")), 0)
    sizes |= {"intermediate_size": inner_size(model), "layer_types": ["full_attention"] * model.num_layers}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes, sparse_prediction=True)).train()
