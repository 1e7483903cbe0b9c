"""What a recipe may say of a stretch of pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from overnight.config.data import Mix
from overnight.config.fields import MACHINE, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Range
from overnight.config.optimizers import AnyOptim, LambConfig


@dataclass(frozen=True)
class BatchWarmup:
    """A batch that grows to the global one: by `initial_batch_size` sequences at a time, on a line over the steps."""

    initial_batch_size: int = 0
    """Sequences in the first step; must divide the global batch. 0: the global batch from the first step on."""
    steps: int = 0
    """Steps before the first one with the global batch."""


@dataclass(frozen=True)
class Phase:
    """A stretch of pretraining at one length, batch and schedule."""

    steps: PositiveInt
    """Optimizer steps."""
    global_batch_size: NonNegativeInt
    """Sequences per optimizer step, over all devices and micro-batches. 0: chosen with the sizes of the network (`model.size: auto`)."""
    seq_len: int = 128
    """Maximum sequence length (tokens, with [CLS] and [SEP]; byte models: bytes of a window)."""
    micro_batch_size: Annotated[int, Range(), MACHINE] = 32
    """Sequences a device processes at once; changes memory and speed, and in training only rounding and which values dropout drops. 0: found by trial when the phase starts, and remembered in the run folder."""
    continues: bool = False
    """Continue the previous phase with its optimizer, moments and schedule, which then covers the steps of both; leave out `optim`."""
    mixture: Mapping[str, Mix] = field(default_factory=dict)
    """How often this phase reads each source of `data.sources`, by name; sources it does not name are not read. Empty: as in `data.sources`."""
    optim: AnyOptim = field(default_factory=LambConfig)
    """Optimizer and schedule."""


@dataclass(frozen=True)
class BertPhase(Phase):
    """A phase of BERT: masked-language-model examples."""

    batch_warmup: BatchWarmup = field(default_factory=BatchWarmup)
    """Smaller batches at the beginning."""
    objective: Literal["masked", "causal"] = "masked"
    """What to predict: `masked` tokens, from both sides, or `causal`: each next token from those before it. `causal` is for a phase before the masked ones, gives more labels per sequence (Gisserot-Boukhlef et al. 2025, arXiv 2507.00994) and needs `nsp: false`."""
    nsp: bool = True
    """Train on pairs of segments with next-sentence prediction; false: on single segments."""
    token_matching: Fraction = 0.0
    """`modernbert`: share of sequences that become a text and a corrupted part of it. For each token, the network predicts which of the two it is in and whether the other contains it too. This teaches a network without segment embeddings to compare two texts. Needs `nsp: false`. 0: none."""
    token_matching_steps: NonNegativeInt = 0
    """`modernbert`: steps with the share `token_matching`; later steps use `final_token_matching`. 0: the whole phase."""
    final_token_matching: Fraction = 0.0
    """`modernbert`: share of pairs after `token_matching_steps`. Without any, the network forgets what it learned; below a quarter, the weight of their loss falls in proportion."""
    short_seq_prob: Fraction = 0.1
    """Share of examples with a random shorter target length (0 to 1)."""
    whole_sentences: bool = False
    """End a segment at the end of a sentence, not where the length is full, so that the next one begins with a sentence. Needs `nsp: false`; pairs are made of sentences anyway."""
    mlm_probability: Fraction = 0.15
    """Share of tokens to predict (0 to 1): 80% become [MASK], 10% a random token, 10% stay."""
    final_mlm_probability: Fraction = 0.0
    """Share of tokens to predict at the end: it falls from `mlm_probability` to this value as the learning rate decays (Ankner et al. 2023, arXiv 2305.15096). 0: no change."""
    max_predictions_per_seq: NonNegativeInt = 20
    """Maximum number of predicted tokens per sequence; 0: as many as `mlm_probability` asks for."""
    whole_word: bool = False
    """Mask all tokens of a word together."""


@dataclass(frozen=True)
class BytePhase(Phase):
    """A phase of a byte model: streams of documents, read on from step to step."""

    num_document_groups: NonNegativeInt = 0
    """Number of groups into which the documents of an epoch are joined; 0: 1,000 or the batch size, whichever is greater."""
    reshuffle: bool = True
    """Draw new groups for every epoch; false repeats those of the first."""
    label_weight: NonNegativeFloat = 0.0
    """Weight of the auxiliary objective: the squared error of `data.label` predicted from the state at the end of a document. 0: none."""
