"""What differs between the families of models: how a run's data is read and its network made.

Everything else of pretraining is the same for both.
"""

from __future__ import annotations

import math

import torch

from overnight.batches.loader import Samples
from overnight.batches.order import key
from overnight.batches.streams import VALIDATION_STREAMS, Streams
from overnight.config import BertPhase, BertRun, BytePhase, ByteRun, Phase, Run
from overnight.corpus.bytes import VOCABULARY_SIZE
from overnight.corpus.shards import Shard, load_manifest, open_shards
from overnight.corpus.tokenizer import Vocabulary, load_vocabulary
from overnight.distributed.world import World
from overnight.engine.loop import StepResult
from overnight.engine.precision import to_fp8
from overnight.engine.recurrent_state import RecurrentState
from overnight.errors import DataError
from overnight.models.bert import BertForPretraining
from overnight.models.bytes import ByteModel, byte_model
from overnight.models.flops import training_flops

_TRAIN, _VALIDATION = 0, 1
# Bytes of a window that are recomputed at once (`memory.activation_checkpointing: full`).
_SEGMENT = 16


class BertWorkload:
    """A run of BERT: pairs of segments of WordPiece tokens.

    Raises:
        DataError: when the data is not prepared.
    """

    def __init__(self, run: BertRun, world: World) -> None:
        self.run, self.world = run, world
        self.manifest = load_manifest(run.data_dir)
        self.vocabulary = load_vocabulary(run.data_dir)
        self.shards = {split: open_shards(run.data_dir, split) for split in ("train", "valid")}
        self.model = self.untrained(world.device)
        if run.precision == "fp8":
            to_fp8(self.model, world.device)
        self.model.encoder.recompute_layers(run.memory.activation_checkpointing)
        if run.compute.torch_compile:
            self.model.encoder.compile_layers()

    def untrained(self, device: torch.device) -> BertForPretraining:
        """Return the network before its first step: the same values every time."""
        return new_model(self.run, self.vocabulary, device)

    def samples(self, phase: Phase, number: int, split: str) -> Samples:
        """Return the stream of a split's examples for a phase and its number."""
        assert isinstance(phase, BertPhase)
        return Samples(_some(self, split), self.vocabulary, phase, _seed(self.run, number, split), self.run.run_dir / "plans")

    def flops(self, done: StepResult) -> float:
        """Return operations of a step, of all processes."""
        return training_flops(self.run.model, self.vocabulary.size, done.sizes) if done.sizes else 0.0

    def carry(self, samples: Samples | Streams) -> None:
        """Return nothing: no state is carried from batch to batch."""

    def validation_carry(self) -> None:
        """Return nothing: none is carried in validation either."""


class ByteWorkload:
    """A run of a byte model: streams of documents, and the state that they carry.

    Raises:
        DataError: when the data is not prepared.
    """

    def __init__(self, run: ByteRun, world: World) -> None:
        self.run, self.world = run, world
        self.manifest = load_manifest(run.data_dir)
        self.shards = {split: open_shards(run.data_dir, split) for split in ("train", "valid")}
        self.model = self.untrained(world.device)

    def untrained(self, device: torch.device) -> ByteModel:
        """Return the network before its first step: the same values every time."""
        torch.manual_seed(key(self.run.seed, 0) >> 1)
        segment = _SEGMENT if self.run.memory.activation_checkpointing == "full" else 0
        return byte_model(
            self.run.model, label=self.run.predicts_label, recompute=segment, graphs=self.run.compute.cuda_graphs and device.type == "cuda"
        ).to(device)

    def samples(self, phase: Phase, number: int, split: str) -> Streams:
        """Return the streams of a split for a phase and its number."""
        assert isinstance(phase, BytePhase)
        return Streams(_some(self, split), phase, _seed(self.run, number, split))

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


Workload = BertWorkload | ByteWorkload


def build_workload(run: Run, world: World) -> Workload:
    """Return data and network of a run."""
    assert isinstance(run, BertRun | ByteRun)
    return BertWorkload(run, world) if isinstance(run, BertRun) else ByteWorkload(run, world)


def new_model(run: BertRun, vocabulary: Vocabulary, device: torch.device) -> BertForPretraining:
    """Return the untrained BERT of a run: the same values on any device."""
    torch.manual_seed(key(run.seed, 0) >> 1)
    return BertForPretraining(run.model, vocabulary.size).to(device)


def bits_per_character(scores: dict[str, float]) -> dict[str, float]:
    """Return bits per character of a byte model, from its validation loss (nats a byte); nothing of another."""
    return {"bits_per_character": scores["byte_loss"] / math.log(2)} if "byte_loss" in scores else {}


def _seed(run: Run, number: int, split: str) -> tuple[int, ...]:
    return (run.seed, number, _TRAIN if split == "train" else _VALIDATION)


def _some(workload: Workload, split: str) -> list[Shard]:
    if not workload.shards[split]:
        raise DataError(f"{workload.run.data_dir} holds no {split} text; raise data.valid_fraction or add documents")
    return workload.shards[split]
