"""Where networks are built whose weights are filled in: without a random number of the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def to_be_filled() -> Iterator[None]:
    """Build a network whose weights are read from a file: the caller's next random numbers are what they would have been.

    The state of a GPU is not even looked at, for which it would have to be started: all weights are drawn on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        yield
