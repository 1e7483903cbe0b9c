"""A masked language model as the evaluations see it: a tokenizer, and the log-probabilities of true tokens at masked positions.

Shapes: N tokens of a flat batch, S sequences, M predicted positions, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from overnight.batches.packing import Batch
from overnight.checkpoint import reader
from overnight.checkpoint.run_corpus import assert_same_corpus, kept_vocabulary
from overnight.config import BertRun
from overnight.corpus.shards import load_manifest
from overnight.corpus.tokenizer import Vocabulary, load_tokenizer
from overnight.engine.finite import finite_outputs
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.engine.workload import blank_model, set_up_encoder
from overnight.errors import DataError
from overnight.state_files import file_digest

# Logits at once: on a CPU they stay in the cache, on a GPU they are large enough for its kernels.
_CPU_LOGITS, _GPU_LOGITS = 1 << 21, 1 << 26
# Tokens of a batch.
_CPU_TOKENS, _GPU_TOKENS = 1 << 13, 1 << 16


class MaskedLM(Protocol):
    """A masked language model of any maker, in evaluation mode."""

    name: str
    """The checkpoint or the folder, for people."""
    digest: str
    """Of the weights."""
    precision: str
    tokenizer: Tokenizer
    """Gives tokens with their places in the text, without special ones."""
    vocabulary: Vocabulary
    longest: int
    """Most tokens of a sequence, the two special ones included."""

    batch_tokens: int
    """Tokens of a batch, where a sequence alone has not more."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        ...

    def log_probabilities(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return ln p of `targets["mlm"]` at `predicted_M` (M, float32), and whether it is the likeliest token (M, bool).

        The vocabulary head is computed at these positions only.
        """
        ...


class RunMaskedLM:
    """The newest checkpoint of a run.

    Raises:
        DataError: when there is none, or it has no masked-LM head, or its vocabulary is missing or another.
    """

    def __init__(self, run: BertRun) -> None:
        place = reader.newest_checkpoint(run.run_dir / "checkpoints")
        if place is None:
            raise DataError(f"{run.run_dir} has no checkpoint; run `overnight pretrain` first")
        self.device = set_up_machine(run)
        corpus, self.vocabulary = kept_vocabulary(run)
        self.tokenizer = plain_tokenizer(load_tokenizer(corpus))
        self.model = blank_model(run, self.vocabulary, self.device)
        progress, state, _ = reader.read_checkpoint(place)
        reader.assert_masked_lm(state, run.run_dir)
        reader.fill(self.model, state, place)
        assert_same_corpus(progress, load_manifest(corpus), corpus, run)
        set_up_encoder(self.model, run, self.device)
        self.model.eval()
        self.name, self.digest = place.name, file_digest(place / "model.safetensors")
        self.precision: str = run.precision
        self.longest = run.model.max_position_embeddings
        self.batch_tokens = batch_tokens(self.device, self.vocabulary.size)

    @torch.inference_mode()
    def log_probabilities(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return ln p of the true token at each predicted position (M), and whether it is the likeliest (M)."""
        assert batch.predicted_M is not None
        batch = batch.to(self.device)
        hidden_ND = self.model.encoder(batch, DTYPES[self.precision])
        hidden_MD = hidden_ND.index_select(0, batch.predicted_M)  # type: ignore[arg-type]
        rows = logit_rows(self.device, self.vocabulary.size)
        parts = [
            of_logits(self.model.mlm_logits(hidden), labels)
            for hidden, labels in zip(hidden_MD.split(rows), batch.targets["mlm"].split(rows), strict=True)
        ]
        return joined(parts)


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Let a tokenizer make no special token, whatever a text says, and neither cut nor fill it up; returns it."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def logit_rows(device: torch.device, vocab_size: int) -> int:
    """Return for how many positions the logits are made at once."""
    return max(1, (_CPU_LOGITS if device.type == "cpu" else _GPU_LOGITS) // vocab_size)


def batch_tokens(device: torch.device, vocab_size: int) -> int:
    """Return how many tokens a batch may have: the logits of its predictions, a sixth of them at most, must fit in memory."""
    tokens, logits = (_CPU_TOKENS, 1 << 28) if device.type == "cpu" else (_GPU_TOKENS, 1 << 32)
    return min(tokens, logits // vocab_size)


def of_logits(logits_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return ln p of the labels, computed in fp32 (M), and whether each has the highest logit (M)."""
    logits_MV = logits_MV.float()
    chosen_M = logits_MV.gather(1, labels_M[:, None]).squeeze(1)
    return chosen_M - torch.logsumexp(logits_MV, 1), logits_MV.argmax(1) == labels_M


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of :func:`of_logits` as two arrays (M).

    Raises:
        NonFiniteError: when a model computes NaN or Infinity, of which it would prefer neither of two sentences.
    """
    log_p, right = zip(*parts, strict=True)
    return finite_outputs(torch.cat(log_p).cpu().numpy()), torch.cat(right).cpu().numpy()


def flat_batch(ids_N: np.ndarray, lengths_S: np.ndarray, predicted_M: np.ndarray, labels_M: np.ndarray) -> Batch:
    """Return sequences of one segment each, one after another.

    Args:
        ids_N: tokens of all sequences, some of them masked.
        lengths_S: of each sequence, special tokens included.
        predicted_M: offsets of the tokens to predict.
        labels_M: the true tokens there.
    """
    starts = np.concatenate([[0], np.cumsum(lengths_S)])
    positions_N = np.arange(len(ids_N)) - np.repeat(starts[:-1], lengths_S)
    return Batch(
        ids_N=torch.from_numpy(np.asarray(ids_N, np.int64)),
        positions_N=torch.from_numpy(positions_N.astype(np.int64)),
        segments_N=torch.zeros(len(ids_N), dtype=torch.int64, device="cpu"),
        starts=torch.from_numpy(starts.astype(np.int32)),
        lengths=tuple(int(n) for n in lengths_S),
        predicted_M=torch.from_numpy(np.asarray(predicted_M, np.int64)),
        targets={"mlm": torch.from_numpy(np.asarray(labels_M, np.int64))},
    )
