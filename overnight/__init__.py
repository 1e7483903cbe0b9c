"""Pretrain a language model on your own text, overnight, on the GPUs you have."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overnight.inference.model import load as load

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Return `overnight.load`, with which torch is imported: not before somebody asks for it."""
    if name == "load":
        return import_module("overnight.inference.model").load
    raise AttributeError(f"module 'overnight' has no attribute {name!r}")
