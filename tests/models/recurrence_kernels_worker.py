"""The recurrence's kernels in a process of their own: `python -m tests.models.recurrence_kernels_worker WHAT FILE`.

`interpret` runs them in numpy, by TRITON_INTERPRET, which must be set before Triton is imported and would change torch.compile in the
process of the tests; `compile` compiles them for GPUs that need not be there.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overnight.models import recurrence
from overnight.models.recurrence import recur
from tests.models.test_recurrence import drawn, with_gradients

Size = tuple[int, int, int, int]
SIZES: dict[str, Size] = {
    "small": (4, 3, 40, 5),
    "wide": (2, 2, 600, 3),
    "unit": (1, 1, 1, 1),
    "often": (2, 17, 8, 2),
    "above": (3, 4, 33, 12),
}
"""Steps, sequences, width and table rows. `wide` is of two blocks, `often` meets a row 16 times, `above` has a row for each place."""
WINDOWS: dict[str, tuple[Size, bool, str, torch.dtype]] = {name: (size, True, "hc", torch.float32) for name, size in SIZES.items()}
WINDOWS |= {f"lstm, gradient of {which}": (SIZES["small"], False, which, torch.float32) for which in ("h", "c", "hc")}
WINDOWS |= {f"small {str(dtype)[6:]}": (SIZES["small"], True, "hc", dtype) for dtype in (torch.bfloat16, torch.float16)}
PLACES = [(40, 2, 7), (5, 5, 130), (3, 9, 2100), (64, 4, 3)]
"""Places, rows and columns."""
GPUS = (75, 80, 90, 100)


def arguments(name: str) -> dict[str, Any]:
    """Those of a window; above the first layer each place has a row of its own."""
    (steps, batch, width, rows), multiplicative, _, _ = WINDOWS[name]
    found = drawn(steps, batch, width, rows, multiplicative, torch.float32)
    return found | ({"rows": torch.arange(rows).view(steps, batch)} if name == "above" else {})


def places(count: int, rows: int, columns: int, device: str = "cpu") -> tuple[Tensor, Tensor, int]:
    """Rows, of which the last is never met if there are several, and integers for gradients, which add up exactly in any order."""
    generator = torch.Generator().manual_seed(count)
    met = torch.randint(max(rows - 1, 1), (count, 1), generator=generator)
    return met.to(device), torch.randint(-9, 10, (count, 1, columns), generator=generator).float().to(device), rows


def activations(pointwise: ModuleType) -> tuple[Tensor, Tensor]:
    """Numbers x, and σ(x), σ(x), tanh(x), σ(x) as the gates of a cell (4, N)."""
    x = torch.cat([torch.linspace(-90, 90, 4001), torch.logspace(-30, 1, 501), -torch.logspace(-30, 1, 501)])
    x = torch.cat([x, torch.tensor([0.0, torch.nan, torch.inf, -torch.inf])])
    n = len(x)
    gates, zeros = torch.empty(1, 4 * n), torch.zeros(1, n)
    pointwise.cell(torch.zeros(1, 4 * n), torch.tensor([0]), x.repeat(4)[None], zeros, gates, zeros.clone(), zeros.clone())
    return x, gates.view(4, n)


def interpret() -> dict[str, Any]:
    """Windows with their gradients, gradients of tables, and activations."""
    from overnight.models import recurrence_kernels as kernels

    recurrence._pointwise = lambda table, dtype: kernels
    found: dict[str, Any] = {name: with_gradients(recur, arguments(name), which, dtype) for name, (_, _, which, dtype) in WINDOWS.items()}
    found["tables"] = [kernels.table_gradient(*places(*size)) for size in PLACES]
    rows, grads, count = places(*PLACES[0])
    grads[3] = torch.nan
    found["nan"] = int(rows[3]), kernels.table_gradient(rows, grads, count)
    with np.errstate(over="ignore", invalid="ignore"):  # the polynomial where x is not near 0
        found["activations"] = activations(kernels)
    return found


def compile_all() -> dict[str, dict[str, int]]:
    """What the machine code of each kernel has, by type and GPU: accesses of two and four words at once, and atomic operations."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from overnight.models import recurrence_kernels as kernels

    wanted: dict[str, tuple[Any, dict[str, Any]]] = {
        "modulate": (kernels._modulate, {}),
        "cell": (kernels._cell, {}),
        "cell backward": (kernels._cell_backward, {"grad_c": None}),
        "modulate backward": (kernels._modulate_backward, {}),
        "sum": (kernels._sum_places, {"PLACES": 16, "COLUMNS": 128}),
        "copy": (kernels._sum_places, {"PLACES": 1, "COLUMNS": 2048}),
    }
    kinds = dict.fromkeys(("table", "before", "c_", "dc_", "total"), "*fp32") | dict.fromkeys(("rows", "order", "firsts"), "*i64")
    kinds |= dict.fromkeys(("columns", "width"), "i32")
    found = {}
    for kind, gpu in [("bf16", gpu) for gpu in GPUS] + [("fp16", 90), ("fp32", 90)]:
        for name, (kernel, flags) in wanted.items():
            signature = {arg: "constexpr" if arg in flags else kinds.get(arg, f"*{kind}") for arg in kernel.arg_names}
            whole = {(i,): [["tt.divisibility", 16]] for i, given in enumerate(signature.values()) if given != "constexpr"}
            source = ASTSource(kernel, signature, {(kernel.arg_names.index(arg),): value for arg, value in flags.items()}, whole)
            text = compile(source, target=GPUTarget("cuda", gpu, 32), options=kernels._OPTIONS).asm["ptx"]
            counts = {f"{way}.{size}": rf"\b{way}\.global[.\w:]*\.{size}\." for way in ("ld", "st") for size in ("v2", "v4")}
            counts |= {"atomic": r"\b(?:atom|red)\."}
            found[f"{name} {kind} {gpu}"] = {what: len(re.findall(pattern, text)) for what, pattern in counts.items()}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save({"interpret": interpret, "compile": compile_all}[sys.argv[1]](), Path(sys.argv[2]))
