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
    """Sequences of the first step; must divide the global batch. 0 is the global batch from the first step on."""
    steps: int = 0
    """Steps before the first one with the global batch."""


@dataclass(frozen=True)
class Phase:
    """A stretch of pretraining at one length, batch and schedule."""

    steps: PositiveInt
    """Optimizer steps."""
    global_batch_size: NonNegativeInt
    """Sequences in one optimizer step, over all devices and micro-batches. 0: chosen with the sizes of the network (`model.size: auto`)."""
    seq_len: int = 128
    """Longest sequence (tokens, with [CLS] and [SEP])."""
    micro_batch_size: Annotated[int, Range(), MACHINE] = 32
    """Sequences a device holds at once; decides memory and speed, and of the training only rounding and which values dropout drops. 0: found by trial at the start of the phase, and remembered in the run folder."""
    continues: bool = False
    """Continue the phase before: with its optimizer, its moments and its schedule, whose steps are then those of both; `optim` is left out."""
    mixture: Mapping[str, Mix] = field(default_factory=dict)
    """How often this phase reads the sources of `data.sources`, by name; one that it does not name is not read. Empty is as `data.sources` says."""
    optim: AnyOptim = field(default_factory=LambConfig)
    """Optimizer and schedule."""


@dataclass(frozen=True)
class BertPhase(Phase):
    """A phase of BERT: masked-language-model examples."""

    batch_warmup: BatchWarmup = field(default_factory=BatchWarmup)
    """Smaller batches at the beginning."""
    objective: Literal["masked", "causal"] = "masked"
    """What is predicted: masked tokens, from both sides, or at every token the next one, from those before it (`causal`, in a phase before the masked ones: more labels a sequence, Gisserot-Boukhlef et al. 2025, arXiv 2507.00994). `causal` needs `nsp: false`."""
    nsp: bool = True
    """Pairs of segments with next-sentence prediction, else single segments."""
    token_matching: Fraction = 0.0
    """`modernbert`: share of the sequences that become a text and a corrupted part of it; of each of their tokens the network says in which of the two it stands and whether the other has it too. That teaches a network without segment embeddings to compare two texts. Needs `nsp: false`. 0 is none."""
    token_matching_steps: NonNegativeInt = 0
    """`modernbert`: steps that have this share of pairs; those behind them have `final_token_matching`. 0 is all of the phase."""
    final_token_matching: Fraction = 0.0
    """`modernbert`: share of pairs after `token_matching_steps`: without any, what was learned is forgotten. Below a quarter the weight of their loss falls in proportion."""
    short_seq_prob: Fraction = 0.1
    """Share of examples that aim at a random shorter length (0 to 1)."""
    whole_sentences: bool = False
    """End a segment where a sentence ends, not where the length is full, so that the next begins with one. Needs `nsp: false`: pairs are made of sentences anyway."""
    mlm_probability: Fraction = 0.15
    """Share of tokens predicted (0 to 1): 80 % become [MASK], 10 % random, 10 % stay."""
    final_mlm_probability: Fraction = 0.0
    """Share of tokens predicted at the end: from `mlm_probability` it falls to this one as the learning rate decays (Ankner et al. 2023, arXiv 2305.15096). 0 keeps it as it is."""
    max_predictions_per_seq: NonNegativeInt = 20
    """Most predicted tokens of a sequence; 0 is as many as `mlm_probability` asks for."""
    whole_word: bool = False
    """Mask all the tokens of a word together."""


@dataclass(frozen=True)
class BytePhase(Phase):
    """A phase of a byte model: streams of documents, read on from step to step."""

    num_document_groups: NonNegativeInt = 0
    """Groups into which the documents of an epoch are joined; 0 is the greater of 1,000 and the batch."""
    reshuffle: bool = True
    """Draw the groups anew for every epoch; false repeats those of the first."""
    label_weight: NonNegativeFloat = 0.0
    """Weight of the auxiliary objective, the squared error of `data.label` predicted from the state at the end of a document; 0 is none."""
