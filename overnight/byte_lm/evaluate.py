"""Bits per byte of a byte model on a split of its corpus."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from overnight.batches.streams import Streams
from overnight.config import ByteRun
from overnight.console import Line
from overnight.corpus.shards import open_shards
from overnight.distributed.world import World
from overnight.engine import loop
from overnight.engine.evaluate import evaluation_config, shown
from overnight.engine.finite import finite_outputs
from overnight.engine.recurrent_state import RecurrentState
from overnight.engine.training_run import set_up_machine
from overnight.errors import ConfigError, DataError
from overnight.interop.byte_models import load_byte_model, without_weight_norm

# Read side by side where all documents are: from here on the matrix products of a step are fast.
_STREAMS = 128
_VALIDATION = 1


@dataclass(frozen=True)
class Score:
    """How well a text was predicted."""

    bits: float
    """Per byte, which papers on byte models call bits per character (BPC)."""
    accuracy: float
    """Share of bytes that were the likeliest (0 to 1)."""
    bytes: int
    """How many were predicted."""
    seconds: float


def evaluate(run: ByteRun, split: str, groups: int | None = 16, max_tokens: int | None = None, line: Line | None = None) -> Score:
    """Predict every byte of some documents from those before it.

    Args:
        run: settings of a run folder or an exported model, with the folder of its prepared data.
        split: train, valid or test.
        groups: how many random ones of 1,000 are read, side by side (Puri et al. 2018: 16 of the test split); None reads every document.
        max_tokens: about how many bytes are read, the first ones of each group; None reads all of it.
        line: where progress is shown; None shows nothing.

    Raises:
        ConfigError, DataError: when there is no model, or no data of that split.
        NonFiniteError: when the loss is NaN or infinite.
    """
    if groups is not None and groups < 1:
        raise ConfigError(f"--groups = {groups}: must be 1 or more")
    start, device = time.perf_counter(), set_up_machine(run)
    if not (run.data_dir / "manifest.json").is_file():
        raise DataError(
            f"{run.data_dir}: holds no prepared data from which to read the {split} text; name its folder with --data.dir=FOLDER"
        )
    model, settings = load_byte_model(run.run_dir)
    model = without_weight_norm(model, settings).to(device)
    files = open_shards(run.data_dir, split)
    if not files:
        raise DataError(f"{run.data_dir} holds no {split} text; raise data.{split}_fraction and prepare it again, or take another --split")
    # Only bytes are predicted, so the text needs no labels.
    phase = replace(list(run.phases.values())[-1], label_weight=0.0)
    streams = Streams(files, phase, (run.seed, 0, _VALIDATION))
    count = None if max_tokens is None else -(-max_tokens // phase.seq_len)
    work = streams.whole(_STREAMS, count) if groups is None else streams.random_groups(groups, count)
    carry = RecurrentState(work[0].micro[0].streams.tolist(), model.state_shape, World(device=device))
    steps = shown(work, split, "bytes", line) if line else work
    found = loop.evaluate(model, model.losses, steps, evaluation_config(run, device), carry)
    finite_outputs(np.array(found["byte_loss"]))
    count = sum(step.tokens for step in work)
    return Score(found["byte_loss"] / math.log(2), found["byte_accuracy"], count, time.perf_counter() - start)
