"""Passes over a window as CUDA graphs: launched as one, where step by step the host launches slower than a GPU computes.

A graph reads and writes at fixed addresses, so what a pass reads is copied to tensors of the graph, and what it returns is copied out:
layers, segments and windows under way may share a graph, and nobody holds its memory. In bf16 the copies of B sequences of width H move
3.8 B / H of the bytes that the matrix products with W read: an eighth for 128 sequences of 4096.

Memory besides that of the passes, with matrix products of p bytes: for each of the T·B places 6pH + 4H in both directions (gates, u, h and c), at
most pH + 4H for the gradients that come in, and 7pH that the backward pass needs itself and its graph does not give back; 10pH² for W, and
5(p + 4)H² for its gradients. In bf16, for 256 steps of 128 sequences of 4096, that is 7.0 GB and 0.8 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor | None, ...]
Capture = Callable[[Callable[[], Tensors]], tuple[Callable[[], None], Tensors]]


def capture(function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
    """Record what a function without arguments launches.

    Args:
        function: may neither wait for the device nor depend on anything but what lies in memory.

    Returns:
        What launches it again, and what it then writes each time.
    """
    # Once for real: kernels are compiled, and cuBLAS makes its handle, which a capture must not see.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as one that pins batches, may continue meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        written = function()
    return graph.replay, written


class Graphs:
    """Functions of tensors, captured at the first call with tensors of some sizes and replayed from then on.

    For the calls of one stream, none of which begins inside another.

    Args:
        capture: how to record a function.
        most: functions and sizes to capture; more are called as they are.
    """

    def __init__(self, capture: Capture = capture, most: int = 8) -> None:
        self.capture, self.most = capture, most
        self.captured: dict[Hashable, tuple[Tensors, Callable[[], None], Tensors]] = {}

    def run(self, name: Hashable, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        """Return what a function returns for tensors: a tuple of new tensors, or None among them.

        Args:
            name: of the function; one of the same name must do the same.
            function: changes none of its arguments.
            tensors: all of one device, or None.
        """
        key = name, tuple(None if x is None else (x.device, x.dtype, x.shape) for x in tensors)
        inside = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if inside or (key not in self.captured and len(self.captured) == self.most):
            return function(*tensors)
        with torch.cuda.device_of(next(x for x in tensors if x is not None)):
            if key not in self.captured:
                read = tuple(None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors)
                _copy(tensors, read)  # table rows must exist before they are looked up
                self.captured[key] = read, *self.capture(partial(function, *read))
            read, replay, written = self.captured[key]
            _copy(tensors, read)
            replay()
            return tuple(None if x is None else x.clone() for x in written)

    def __deepcopy__(self, memo: object) -> Graphs:
        return Graphs(self.capture, self.most)


def _copy(tensors: Tensors, into: Tensors) -> None:
    for x, to in zip(tensors, into, strict=True):
        if x is not None and to is not None:
            to.copy_(x)
