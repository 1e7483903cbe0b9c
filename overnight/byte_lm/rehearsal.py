"""How long a linear probe will take: some of its texts, read by an untrained network, timed."""

from __future__ import annotations

import time

import numpy as np

from overnight.byte_lm.features import extract_features
from overnight.byte_lm.linear_probe import read_probe_task
from overnight.config import ByteRun
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.models.bytes import byte_model

# Texts that are read, as many as are read at once.
_TEXTS = 128
# Regressions at all strengths, a row to train on (s): that on all features, that without the best unit, and a seed's share of the n-grams'.
_FIT, _FITS = 1.4e-3, 3


def probe_seconds(run: ByteRun, name: str) -> float:
    """Return how long a linear probe of a run will take, with all its seeds (s); nothing is kept or written.

    Args:
        name: key in `run.linear_probe`.

    Raises:
        DataError: when a file of the task is missing or a row cannot be used.
    """
    begun, spec, device = time.perf_counter(), run.linear_probe[name], set_up_machine(run)
    task = read_probe_task(spec)
    reading = time.perf_counter() - begun
    lengths = np.array([len(text) for text in task.documents])
    chosen = np.linspace(0, len(lengths) - 1, min(_TEXTS, len(lengths))).astype(int)
    model, texts = byte_model(run.model).to(device), [task.documents[i] for i in chosen]
    # Untimed the first time, in which the recurrence may be compiled.
    extract_features(model, texts[:1], spec.features, DTYPES[run.precision])
    begun = time.perf_counter()
    extract_features(model, texts, spec.features, DTYPES[run.precision])
    features = (time.perf_counter() - begun) * float(lengths.sum() / lengths[chosen].sum())
    rows = sum(len(parts["train"]) for parts in task.parts.values())
    # The pretrained network reads the texts once, a random one for each seed.
    return reading + (1 + len(spec.seeds)) * features + 2 * _FITS * rows * _FIT
