"""Models without a network and pairs of sentences whose answers are known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from overnight.batches.packing import Batch
from overnight.corpus.tokenizer import build_tokenizer, vocabulary
from overnight.evaluation.masked_lm import plain_tokenizer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "cat", "cats", "sleep", "sleeps", "dog", "dogs", "bark", "##s", "##ing", ".")
TOKENS = (*SPECIALS, *WORDS)


class TableLM:
    """A masked LM whose ln p of a token at a place is a function of the token and of the sentence, which counts the tokens that it read.

    Args:
        log_p: of the true token, from all true tokens of the sequence and its place in it.
    """

    name, digest, precision, device, longest, batch_tokens = "table", "0" * 16, "fp32", torch.device("cpu"), 12, 64

    def __init__(self, log_p: Callable[[Sequence[int], int], float], tokens: Sequence[str] = TOKENS) -> None:
        self.log_p, self.tokenizer, self.vocabulary = log_p, plain_tokenizer(build_tokenizer(tokens, True)), vocabulary(tokens, True)
        self.sequences: list[tuple[int, ...]] = []

    def log_probabilities(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the function's values, and that the tokens with an even number are guessed right."""
        assert batch.predicted_M is not None
        ids, starts = batch.ids_N.clone(), batch.starts.tolist()
        ids[batch.predicted_M] = batch.targets["mlm"]
        found = []
        for at in batch.predicted_M.tolist():
            sequence = max(i for i, start in enumerate(starts[:-1]) if start <= at)
            found.append(self.log_p(ids[starts[sequence] : starts[sequence + 1]].tolist(), at - starts[sequence]))
        self.sequences += [tuple(batch.ids_N[a:b].tolist()) for a, b in itertools.pairwise(starts)]
        return np.array(found, np.float32), (batch.targets["mlm"] % 2 == 0).numpy()


def row(good: str, bad: str, term: str = "agreement", field: str = "morphology") -> dict[str, str]:
    """Return a line of a paradigm."""
    return {"sentence_good": good, "sentence_bad": bad, "field": field, "linguistics_term": term}


def write_paradigms(folder: Path, paradigms: dict[str, list[dict[str, str]]]) -> Path:
    """Write paradigms as BLiMP has them; returns the folder."""
    data = folder / "data"
    data.mkdir(parents=True)
    for name, rows in paradigms.items():
        (data / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    return folder
