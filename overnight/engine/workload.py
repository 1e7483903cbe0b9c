"""What differs between the families of models: how a run's data is read and its network made.

Everything else of pretraining is the same for both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from overnight.batches.loader import Samples
from overnight.batches.masking import context_free_loss
from overnight.batches.matching import share_of_pairs
from overnight.batches.mixture import MixedSamples, by_source, mixture, shares
from overnight.batches.order import key
from overnight.batches.streams import VALIDATION_STREAMS, Streams
from overnight.checkpoint.initial import begin_from
from overnight.checkpoint.reader import TrainingProgress
from overnight.checkpoint.run_corpus import assert_same_corpus, keep_corpus
from overnight.config import BertPhase, BertRun, BytePhase, ByteRun, ModernBertConfig, Phase, Run
from overnight.corpus.bytes import VOCABULARY_SIZE
from overnight.corpus.shards import Shard, load_manifest, open_shards
from overnight.corpus.tokenizer import Vocabulary, load_vocabulary
from overnight.distributed.world import World
from overnight.engine.loop import StepResult
from overnight.engine.precision import DTYPES, to_fp8
from overnight.engine.recurrent_state import RecurrentState
from overnight.errors import ConfigError, DataError
from overnight.models.building import plain_defaults, to_be_filled
from overnight.models.bytes import ByteModel, byte_model
from overnight.models.encoders import MaskedLM, masked_lm
from overnight.models.flops import training_flops
from overnight.models.fused_layer import why_not_compiled
from overnight.models.modernbert import ModernBertForMaskedLM

_TRAIN, _VALIDATION = 0, 1
# Bytes of a window that are recomputed at once (`memory.activation_checkpointing: full`).
_SEGMENT = 16
# Tokens that are counted for the loss without context and the bias of the decoder (a second for each 200 M): it is as exact as they are many.
_COUNTED = 20_000_000

# The torch from which on it compiles layers that the backward pass computes again.
_COMPILES_AGAIN = "2.13"
# Share of pairs from which on the loss of token matching has a weight of 1; below, it is in proportion.
_FULL_WEIGHT = 0.25


class Workload(Protocol):
    """What the engine asks of the data and the network of a training."""

    model: Any
    """The network: a module with `losses`."""
    fingerprint: str
    """Of the data: a checkpoint belongs to it."""

    def untrained(self, device: torch.device) -> nn.Module:
        """Return the network before its first step: the same values every time."""
        ...

    def samples(self, phase: Phase, number: int, split: str) -> Any:
        """Return the examples of a split (`train`, `valid`) for a phase and its number."""
        ...

    def flops(self, done: StepResult) -> float:
        """Return operations of a step, of all processes."""
        ...

    def carry(self, samples: Any) -> RecurrentState | None:
        """Return a zero state of this process's streams, of a model that carries one."""
        ...

    def validation_carry(self) -> RecurrentState | None:
        """Return a zero state of the streams of an evaluation."""
        ...

    def check_data(self, progress: TrainingProgress) -> None:
        """Check that the data is still what a checkpoint is of."""
        ...

    def keep(self) -> None:
        """Copy into the run folder what later commands need of the data."""
        ...

    def validation_counts(self) -> dict[str, float]:
        """Return how much data the validation has, by name, and what is known of it before the first step."""
        ...


class _Prepared:
    """Prepared shards of a run."""

    def __init__(self, run: Run, world: World) -> None:
        self.world, self.manifest = world, load_manifest(run.data_dir)
        self.fingerprint, self._folder, self._run = self.manifest.fingerprint(), run.data_dir, run
        self.shards = {split: open_shards(run.data_dir, split) for split in ("train", "valid")}

    def check_data(self, progress: TrainingProgress) -> None:
        """Check that the prepared data is still what a checkpoint is of."""
        assert_same_corpus(progress, load_manifest(self._folder), self._folder, self._run)

    def keep(self) -> None:
        """Copy vocabulary and manifest into the run folder."""
        keep_corpus(self._run, self.manifest)

    def validation_counts(self) -> dict[str, float]:
        """Return the documents and tokens of the validation."""
        return {f"validation_{what}": self.manifest.count("valid", what) for what in ("documents", "tokens")}

    def split(self, name: str) -> list[Shard]:
        """Return the shards of a split.

        Raises:
            DataError: where there are none.
        """
        if not self.shards[name]:
            remedy = "lower" if name == "train" else "raise"
            raise DataError(f"{self._folder} holds no {name} text; {remedy} data.valid_fraction or add documents")
        return self.shards[name]


class BertWorkload(_Prepared):
    """A run of an encoder: masked segments, or pairs of them, of WordPiece tokens.

    Raises:
        DataError: when the data is not prepared.
    """

    def __init__(self, run: BertRun, world: World) -> None:
        super().__init__(run, world)
        self.run, self.vocabulary = run, load_vocabulary(run.data_dir)
        self.model = self.untrained(world.device)
        set_up_encoder(self.model, run, world.device)

    def untrained(self, device: torch.device) -> MaskedLM:
        """Return the network before its first step: the same values every time."""
        model = new_model(self.run, self.vocabulary, device)
        if isinstance(self.run.model, ModernBertConfig) and self.run.model.unigram_bias:
            assert isinstance(model, ModernBertForMaskedLM)
            model.begin_at_unigram(torch.from_numpy(self.training_counts()))
        if self.run.init:
            begin_from(model, self.run, self.vocabulary)
        return model

    def training_counts(self) -> np.ndarray:
        """Return how often each token occurs in the training text (int64 [V]), with the sources in the shares that the first phase reads."""
        shards, mixes = self.shards["train"], mixture(self.run.data, next(iter(self.run.phases.values())))
        if not mixes:
            return token_counts(shards, self.vocabulary.size)
        counts = {name: token_counts(mine, self.vocabulary.size) for name, mine in by_source(shards, list(mixes)).items()}
        sizes = {name: sum(len(shard.tokens) for shard in shards if shard.source == name) for name in mixes}
        total, parts = sum(sizes.values()), shares(mixes, sizes)
        return np.rint(sum(counts[name] * (part * total / counts[name].sum()) for name, part in parts.items())).astype(np.int64)

    def samples(self, phase: Phase, number: int, split: str) -> Samples:
        """Return the stream of a split's examples for a phase and its number; of training text by the mixture of its sources."""
        assert isinstance(phase, BertPhase)
        if split != "train":  # the masked tokens of a run with token matching are those of any other
            phase = replace(phase, token_matching=0.0)
        given = self.split(split), self.vocabulary, phase, seed(self.run, number, split), self.run.run_dir / "plans"
        mixes = mixture(self.run.data, phase)
        return MixedSamples(*given, mixes) if mixes and split == "train" else Samples(*given)

    def flops(self, done: StepResult) -> float:
        """Return operations of a step, of all processes."""
        return training_flops(self.run.model, self.vocabulary.size, done.sizes) if done.sizes else 0.0

    def validation_counts(self) -> dict[str, float]:
        """Return the documents and tokens of the validation, and the loss of a model without context on them."""
        valid = token_counts(self.shards["valid"], self.vocabulary.size)
        if not valid.any():
            return super().validation_counts()
        loss = context_free_loss(self.training_counts(), valid)
        return {**super().validation_counts(), "plateau_loss": round(loss, 4)}

    def carry(self, samples: Samples | Streams) -> None:
        """Return nothing: no state is carried from batch to batch."""

    def validation_carry(self) -> None:
        """Return nothing: none is carried in validation either."""


class ByteWorkload(_Prepared):
    """A run of a byte model: streams of documents, and the state that they carry.

    Raises:
        DataError: when the data is not prepared, or a phase cannot read it: before a folder is claimed, and not after the phases before.
    """

    def __init__(self, run: ByteRun, world: World) -> None:
        super().__init__(run, world)
        self.run = run
        for number, phase in enumerate(run.phases.values()):
            self.samples(phase, number, "train").stream_numbers(world.rank, world.size)
        self.model = self.untrained(world.device)

    def untrained(self, device: torch.device) -> ByteModel:
        """Return the network before its first step: the same values every time."""
        torch.manual_seed(key(self.run.seed, 0) >> 1)
        segment = _SEGMENT if self.run.memory.activation_checkpointing == "full" else 0
        graphs = self.run.compute.cuda_graphs and device.type == "cuda"
        with plain_defaults():
            return byte_model(self.run.model, label=self.run.predicts_label, recompute=segment, graphs=graphs).to(device)

    def samples(self, phase: Phase, number: int, split: str) -> Streams:
        """Return the streams of a split for a phase and its number."""
        assert isinstance(phase, BytePhase)
        mixes = mixture(self.run.data, phase) if split == "train" else {}
        return Streams(self.split(split), phase, seed(self.run, number, split), mixes)

    def flops(self, done: StepResult) -> float:
        """Return operations of a step, of all processes."""
        return training_flops(self.run.model, VOCABULARY_SIZE, done.sizes) if done.sizes else 0.0

    def carry(self, samples: Samples | Streams) -> RecurrentState:
        """Return a zero state of this process's streams."""
        assert isinstance(samples, Streams)
        return RecurrentState(samples.stream_numbers(self.world.rank, self.world.size), self.model.state_shape, self.world)

    def validation_carry(self) -> RecurrentState:
        """Return a zero state of the streams of an evaluation, all of which every process reads."""
        return RecurrentState(range(VALIDATION_STREAMS), self.model.state_shape, World(device=self.world.device))


def build_workload(run: Run, world: World) -> BertWorkload | ByteWorkload:
    """Return data and network of a run."""
    assert isinstance(run, BertRun | ByteRun)
    return BertWorkload(run, world) if isinstance(run, BertRun) else ByteWorkload(run, world)


def new_model(run: BertRun, vocabulary: Vocabulary, device: torch.device) -> MaskedLM:
    """Return the untrained encoder of a run: the same values on any device."""
    torch.manual_seed(key(run.seed, 0) >> 1)
    with plain_defaults():
        return masked_lm(run.model, vocabulary.size, run.predicts_next_sentence, run.matches_tokens).to(device)


def blank_model(run: BertRun, vocabulary: Vocabulary, device: torch.device) -> MaskedLM:
    """Return what :func:`new_model` does, to be filled with trained weights: no random number of the caller's is touched."""
    with to_be_filled():
        torch.default_generator.manual_seed(key(run.seed, 0) >> 1)  # torch.manual_seed would seed the GPUs, too
        return masked_lm(run.model, vocabulary.size, run.predicts_next_sentence, run.matches_tokens).to(device)


def set_up_encoder(model: Any, run: Run, device: torch.device) -> None:
    """Have the layers of a BERT's encoder computed as a run says: in 8 bits, recomputed, fused or compiled.

    Raises:
        ConfigError: when they are to be compiled, and cannot be.
    """
    if run.precision == "fp8":
        to_fp8(model, device)
    model.encoder.recompute_layers(run.memory.activation_checkpointing)
    # What 8 bits put in the place of the linear maps is not what is fused.
    if compiles_layers(run, device) and (run.precision == "fp8" or model.encoder.fuse_layers(device, DTYPES[run.precision])):
        why = why_not_compiled_again(run)
        if why and run.compute.torch_compile != "auto":
            raise ConfigError(f"compute.torch_compile = true: {why}; or set it to auto")
        if not why:
            model.encoder.compile_layers()


def why_not_compiled_again(run: Run) -> str:
    """Return why the layers of a run that the backward pass computes again are not compiled; empty where they are, and where it computes none."""
    if run.memory.activation_checkpointing == "none" or torch.__version__ >= _COMPILES_AGAIN:
        return ""
    return f"torch {torch.__version__} fails to compile layers that are computed again (memory.activation_checkpointing), 2.13 does not"


def compiles_layers(run: Run, device: torch.device) -> bool:
    """Return whether the layers of an encoder are compiled, or taken by kernels of their own, on a device.

    Raises:
        ConfigError: when the recipe asks for it on a GPU for which it cannot be done.
    """
    asked, why = run.compute.torch_compile, why_not_compiled(device)
    if asked == "auto":
        return device.type == "cuda" and not why
    if asked and why:
        raise ConfigError(f"compute.torch_compile = true: {why}; or set it to auto")
    return asked


def loss_weights(phase: Phase, step: int) -> dict[str, float]:
    """Return the weights of the losses of a step (from 0) of a phase, by name; 1 where there is none."""
    if isinstance(phase, BytePhase):
        return {"label": phase.label_weight}
    # The mean over the tokens of few pairs is noisy: at full weight a twentieth of the sequences costs the masked tokens as much as a quarter does.
    if isinstance(phase, BertPhase) and phase.token_matching:
        return {"match": min(1.0, share_of_pairs(phase, step) / _FULL_WEIGHT)}
    return {}


def bits_per_byte(scores: dict[str, float]) -> dict[str, float]:
    """Return bits per byte of a byte model, from its validation loss (nats a byte); nothing of another."""
    return {"bits_per_byte": scores["byte_loss"] / math.log(2)} if "byte_loss" in scores else {}


def token_counts(shards: list[Shard], size: int) -> np.ndarray:
    """Return how often each token occurs (int64 [V]); of a large corpus, among tokens at equal distances."""
    every = max(1, sum(len(shard.tokens) for shard in shards) // _COUNTED)
    return sum((np.bincount(shard.tokens[::every], minlength=size) for shard in shards), np.zeros(size, np.int64))


def seed(run: Run, number: int, split: str) -> tuple[int, ...]:
    """Return the seed of the order of a split in a phase and its number."""
    return (run.seed, number, _TRAIN if split == "train" else _VALIDATION)
