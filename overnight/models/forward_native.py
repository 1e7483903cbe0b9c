"""An encoder on a CPU in one call, in fp32, of a network that is trained no more: forward.c.

A single text has few tokens, so that Python and torch between the operations take as long as the matrix products. These are faster here too, for any number
of rows: a weight is laid out once in the order in which it is read, in panels.

Shapes: N tokens of the flat batch, S sequences, D width, E dimensions of a head.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overnight import native
from overnight.batches.packing import Batch

_SOURCE = Path(__file__).with_name("forward.c")
_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p
_TABLES = ("word", "position", "segment")
_MAPS = ("norm1", "qkv", "out", "norm2", "up", "down")
_ARGUMENTS = {
    "pack": [_LONG, _LONG, _POINTER, _POINTER],
    "linear": [*[_LONG] * 3, *[_POINTER] * 4],
    "forward": [_LONG, *[_POINTER] * 7],
}


class View(NamedTuple):
    """How attention of a layer sees a sequence."""

    before: int = -1
    """Tokens before it that one sees; -1 is all."""
    after: int = -1
    """Tokens behind it."""
    turns: tuple[Tensor, Tensor] | None = None
    """Cosine and sine of the rotary positions from 0 on, at least as many as the longest sequence has tokens: (T, 1, 1, E/2) each, fp32."""


class _View(ctypes.Structure):
    _fields_ = [("before", _LONG), ("after", _LONG), ("cos", _POINTER), ("sin", _POINTER)]


class _Embedding(ctypes.Structure):
    _fields_ = [("tables", _POINTER * 3), ("numbers", _POINTER * 3), ("rows", _LONG * 3), ("norm", _POINTER * 2)]


class _Sizes(ctypes.Structure):
    _fields_ = [*((name, _LONG) for name in ("N", "S", "D", "H", "F", "longest", "gated")), ("eps", ctypes.c_float)]


@functools.cache
def _library() -> ctypes.CDLL:
    found = native.library(_SOURCE)
    for name, kinds in _ARGUMENTS.items():
        getattr(found, name).argtypes = kinds
    found.packed_size.argtypes, found.packed_size.restype = [_LONG, _LONG], _LONG
    return found


@functools.cache
def available() -> bool:
    """Return whether forward.c can be used here, and is faster than torch; builds it if need be."""
    try:
        return bool(_library().worthwhile())
    except native.NoCompiler:
        return False


def takes(weight: Tensor) -> bool:
    """Return whether a weight can be laid out in panels."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and available()


def panels(weight: Tensor) -> Tensor:
    """Return a weight (out, in) in panels, one after the other."""
    out = weight.new_empty(_library().packed_size(*weight.shape))
    _library().pack(*weight.shape, weight.detach().contiguous().data_ptr(), out.data_ptr())
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """Return x @ W.T + bias, without gradients: (N, out).

    Args:
        x: fp32 (N, in).
        weight: W (out, in) as of :func:`panels`.
        bias: fp32 (out).
        outputs: out.
    """
    x, out = x.contiguous(), x.new_empty(len(x), outputs)
    assert x.dtype == torch.float32, x.dtype
    _run("linear", len(x), outputs, x.shape[1], x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
    return out


class NativeEncoder:
    """An encoder whose weights are in panels, from its embeddings to its last norm.

    Args:
        encoder: BERT's or ModernBERT's, which have the same names for their parts; its tensors stay where they are.
    """

    def __init__(self, encoder: Any) -> None:
        self._encoder = encoder
        self._fixed: _Fixed | None = None

    def __call__(self, batch: Batch, views: Sequence[View], last_norm: bool) -> Tensor:
        """Return hidden states (N, D), without gradients.

        Args:
            views: of each layer to go through, from the first on.
            last_norm: whether that of ModernBERT follows.

        Raises:
            IndexError: when a token, a place or a segment has no row in its table.
        """
        fixed = self._fixed = self._fixed or _Fixed(self._encoder)
        numbers = [x.contiguous() for x in (batch.ids_N, batch.positions_N, batch.segments_N)]
        assert batch.starts.dtype == torch.int32 and all(x.dtype == torch.int64 for x in numbers)
        embedding = _Embedding(fixed.tables, _pointers(numbers), fixed.rows, fixed.norm)
        sizes = _Sizes(len(numbers[0]), len(batch.lengths), *fixed.sizes, max(batch.lengths), fixed.gated, fixed.eps)
        kinds = {id(view): _View(view.before, view.after, *(x.data_ptr() for x in view.turns or ())) for view in views}
        seen = (_POINTER * len(views))(*(ctypes.addressof(kinds[id(view)]) for view in views))
        out = torch.empty(len(numbers[0]), fixed.sizes[0], dtype=torch.float32, device="cpu")
        last = fixed.last if last_norm else None
        arguments = ctypes.byref(sizes), batch.starts.data_ptr(), ctypes.byref(embedding), fixed.maps, seen, last, out.data_ptr()
        if not _run("forward", len(views), *arguments):
            raise IndexError("a token, a place or a segment of the batch has no row in its table")
        return out

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of, whose tensors lie elsewhere."""
        return self.__dict__ | {"_fixed": None}


class _Fixed:
    """What is the same in each call: sizes of an encoder, and where its tensors lie."""

    def __init__(self, encoder: Any) -> None:
        layer, tables = encoder.layers[0], [getattr(encoder, name).weight for name in _TABLES if hasattr(encoder, name)]
        self.sizes = tables[0].shape[1], layer.heads, layer.down.in_features
        self.eps, self.gated = layer.norm2.eps, hasattr(encoder, "final_norm")
        self.tables, self.rows = _pointers([*tables, *[None] * (3 - len(tables))]), (_LONG * 3)(*map(len, tables))
        self.norm = _pointers(_map(encoder.norm))
        self.last = encoder.final_norm.weight.data_ptr() if self.gated else None
        self.maps = _pointers([x for each in encoder.layers for name in _MAPS for x in _map(getattr(each, name))])


def _map(part: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return weight and bias of a part of a layer, which may be nothing but the identity."""
    packed = getattr(part, "packed", None)
    return getattr(part, "weight", None) if packed is None else packed, getattr(part, "bias", None)


def _pointers(tensors: Sequence[Tensor | None]) -> Any:
    return (_POINTER * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))


def _run(name: str, *values: Any) -> bool:
    """Call a function of forward.c; returns whether it took what it was given."""
    done = getattr(_library(), name)(*values)
    if not done:
        raise MemoryError("no memory for the hidden states of a batch")
    return bool(done > 0)
