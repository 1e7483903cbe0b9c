"""How well an encoder of ModernBERT's form will do, from its parameters and the text it reads: a law fitted to runs of our own, and its coefficients.

    L(N, D) = E + A / N^a + B / D^b        bits per character of validation text (Hoffmann et al. 2022, arXiv 2203.15556)

N counts the parameters of the layers, without embeddings; D characters of text, not tokens, so that vocabularies can be compared. Of text that is
read again, D counts what reading it once more is worth, and of a network that is larger than its text can fill, N what the excess is worth (:func:`worth`,
Muennighoff et al. 2023, arXiv 2305.16264).

`benchmarks/scaling_sweep.py` makes the runs and `benchmarks/scaling_fit.py` fits them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from overnight.config import ModernBertConfig
from overnight.corpus.document_table import open_document_table
from overnight.corpus.shards import Manifest
from overnight.models.modernbert import inner_size

REPEATS, EXCESS = 15.387743, 5.309743
"""Repetitions of a text, and multiples of the parameters that fit it, after which one more is worth 1/e of the first: R_D* and R_N* of Muennighoff et al., fitted to causal models."""
HELPFUL_EPOCHS = 4
"""Passes over a text that are worth nearly as much as new text, by the same study."""


@dataclass(frozen=True)
class Law:
    """Coefficients of the law."""

    floor: float
    """E: bits per character that no network and no text take away."""
    a_scale: float
    a: float
    b_scale: float
    b: float

    def loss(self, parameters: float, characters: float) -> float:
        """Return bits per character.

        Args:
            parameters: of the layers.
            characters: of text without repetitions.
        """
        return self.floor + self.a_scale * parameters**-self.a + self.b_scale * characters**-self.b

    def fitting(self, characters: float) -> float:
        """Return the parameters with which a text, read once, gives the least loss for the operations N·D: where both terms fall alike."""
        return float((self.a * self.a_scale / (self.b * self.b_scale) * characters**self.b) ** (1 / self.a))

    def loss_on(self, unique: float, parameters: float, characters: float) -> float:
        """Return bits per character after the reading of some characters of a text that has only `unique` of them."""
        return self.loss(worth(parameters, self.fitting(unique), EXCESS), worth(characters, unique, REPEATS))


LAW = Law(floor=0.383, a_scale=53.6, a=0.34, b_scale=79.8, b=0.28)
"""Floor and scale are fitted to 17 runs (0.4 to 7.2 M parameters, 9 to 300 M characters: benchmarks/results/2026-11-26-law); the exponents and the ratio of the scales are those of
Hoffmann et al., since several others fit as well and choose other sizes where there are no runs. It is 3.9 % off on the 17; fitted to 15 of them, -0.7 and 2.8 % on the other two."""
LAW_FROM = "17 runs (the exponents are those of causal models)"


def layer_parameters(model: ModernBertConfig) -> int:
    """Return the parameters of the layers in matrices: 4h² + 3·h·ff each."""
    h = model.hidden_size
    return model.num_layers * (4 * h * h + 3 * h * inner_size(model))


def characters_per_token(manifest: Manifest, folder: Path) -> float:
    """Return characters of the documents of a prepared folder for each of their tokens.

    Of a folder that was prepared before their characters were kept, the bytes of its sources, which count what was dropped, too.
    """
    tokens = sum(shard.tokens for shard in manifest.shards)
    table = open_document_table(folder, manifest)
    known = sum(int(table.rows(shard).characters.sum()) for shard in manifest.shards) if table else 0
    return (known or sum(source.bytes for source in manifest.sources)) / max(1, tokens)


def worth(amount: float, first: float, fades: float) -> float:
    """Return what an amount is worth of which only the `first` counts in full: U + U·R*·(1 - e^(-R/R*)) after R more of it, and R* = `fades`."""
    if amount <= first:
        return amount
    return first * (1 + fades * (1 - math.exp(-(amount / first - 1) / fades)))
