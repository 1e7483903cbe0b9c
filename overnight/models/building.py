"""Where networks are built: always as fp32 on the CPU, and where their weights are filled in without a random number of the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def plain_defaults() -> Iterator[None]:
    """Make tensors of fp32 on the CPU, whatever torch.set_default_dtype and torch.set_default_device say: parameters are fp32, and drawn alike for any device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def to_be_filled() -> Iterator[None]:
    """Build a network whose weights are read from a file: as of :func:`plain_defaults`, and the caller's next random numbers are what they would have been.

    The state of a GPU is not even looked at, for which it would have to be started: all weights are drawn on the CPU.
    """
    with plain_defaults(), torch.random.fork_rng(devices=[]):
        yield
