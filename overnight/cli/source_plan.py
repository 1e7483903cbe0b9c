"""What a plan says of the text: the examples of an epoch, and of each named source its share and how often it is read."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from overnight.batches.loader import Samples
from overnight.batches.mixture import by_source, mixture, shares
from overnight.config import BertPhase, Data, Phase, Run
from overnight.corpus.named_sources import named_paths
from overnight.corpus.shards import Shard, open_shards
from overnight.corpus.tokenizer import load_vocabulary
from overnight.display import share
from overnight.errors import DataError

_JUDGED_TOKENS = 1_000_000


@dataclass(frozen=True)
class SourcePlan:
    """What a phase reads of a source."""

    name: str
    share: float | None
    """Of the examples (of bytes: of the text); None where it follows from the sizes of the sources, and none is prepared."""
    epochs: float | None
    """How often it is read; None where nothing is prepared."""


def absent_paths(data: Data) -> list[str]:
    """Return the paths of the text that are not there; globs, members of archives, data sets, servers and variables that are not set are not looked for."""
    filled = {path: os.path.expanduser(os.path.expandvars(path)) for _, path in named_paths(data)}
    return [path for path, real in filled.items() if not (":" in real or "$" in real or glob.has_magic(real) or Path(real).exists())]


def epoch_sizes(run: Run, phase: Phase, number: int) -> dict[str, float]:
    """Return the number of examples in an epoch of a phase, by source (one without a name where none are named).

    Those of the first documents are counted, and multiplied by what there is more (tokens).

    Raises:
        DataError: when a source has no text to train on, or none is prepared.
    """
    shards = open_shards(run.data_dir, "train")
    if not shards:
        raise DataError(f"{run.data_dir} holds no train text; lower data.valid_fraction or add documents")
    names = list(mixture(run.data, phase))
    return {name: _examples(run, phase, number, mine) for name, mine in (by_source(shards, names) if names else {"": shards}).items()}


def _examples(run: Run, phase: Phase, number: int, shards: list[Shard]) -> float:
    shard, tokens = shards[0], sum(len(each.tokens) for each in shards)
    if not isinstance(phase, BertPhase):
        return tokens / phase.seq_len
    ends = shard.sentence_starts[shard.document_sentences]
    documents = max(1, int(np.searchsorted(ends, _JUDGED_TOKENS, side="right")) - 1)
    first = dataclasses.replace(shard, document_sentences=shard.document_sentences[: documents + 1])
    samples = Samples([first], load_vocabulary(run.data_dir), phase, (run.seed, number, 0))
    return samples.epoch_size() * tokens / int(ends[documents])


def source_plans(run: Run, phase: Phase, sequences: int, sizes: Mapping[str, float] | None) -> list[SourcePlan]:
    """Return what a phase reads of each named source.

    Args:
        sequences: of the whole phase.
        sizes: of :func:`epoch_sizes`; None where nothing is prepared.
    """
    mixes = mixture(run.data, phase)
    if sizes:
        parts = shares(mixes, sizes)
        return [SourcePlan(name, part, part * sequences / sizes[name]) for name, part in parts.items()]
    by_weight = any(mix.weight > 0 for mix in mixes.values())
    known = shares(mixes, dict.fromkeys(mixes, 1.0)) if by_weight else {}
    return [SourcePlan(name, known.get(name), None) for name in mixes]


def sources_text(sources: list[SourcePlan]) -> str:
    """Return the sources of a phase for people."""
    told = []
    for source in sources:
        parts = [share(source.share)] if source.share is not None else []
        parts += [f"{source.epochs:.2f} epochs"] if source.epochs is not None else []
        told.append(f"{source.name} {' = '.join(parts)}".strip())
    return ", ".join(told)
