"""The kernels for a GPU in a process of their own, for tests/optim/test_kernels.py: `python -m tests.optim.kernels_worker WHAT FILE`.

`interpret` runs them in numpy, by TRITON_INTERPRET, which must be set before Triton is imported and would change torch.compile in the
process of the tests; `compile` compiles them for a GPU that need not be there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overnight.optim import layerwise
from overnight.optim.batch import Batch
from overnight.optim.layerwise import Layerwise
from tests.optim.problem import CLASSES, draw
from tests.optim.test_layerwise import EVERY

SIZES = [1, 7, 1000, 5000, 70000]
Case = tuple[str, dict[str, Any], torch.dtype]
CASES: dict[str, Case] = {f"{name}-{i}": (name, settings, torch.float32) for i, (name, settings) in enumerate(EVERY)}
CASES |= {f"{name}-bf16": (name, {}, torch.bfloat16) for name in CLASSES}
CASES |= {
    "lamb-fp16": ("lamb", {"max_grad_norm": 0.5}, torch.float16),
    # 0/0 must not be added in what is read beyond the end of a tensor, nor reach one that is left alone.
    "lamb-eps-0": ("lamb", {"eps": 0.0, "lr": 0.01}, torch.float32),
    "lans-all": ("lans", {"skip_zero_grad": False, "lr": 0.01}, torch.float32),
}
QUICK = ["lamb-1", "lamb-3", "lans-5", "lars-8", "lamb-fp16", "lans-bf16", "lamb-eps-0"]
"""Cases that take every branch of the kernels; the others take half a minute of numpy more."""


def trajectory(
    name: str, settings: dict[str, Any], dtype: torch.dtype, held: torch.dtype | None = None, device: str = "cpu"
) -> dict[str, list[Tensor]]:
    """Three steps in two groups on tensors of all sizes, one of them not aligned and one with zeros for a gradient.

    Args:
        name, settings: optimizer.
        dtype: precision of the numbers given.
        held: type that holds them; the same if None.
        device: where.
    """

    def numbers(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
        return (draw(*shape, seed=seed) * scale).to(dtype).to(device, held or dtype)

    odd = torch.zeros(3001, dtype=held or dtype, device=device)[1:]
    odd.copy_(numbers(3000, seed=98))
    params = [*(numbers(size, seed=size) for size in SIZES), odd, numbers(40, 3, seed=99)]
    for p in params:
        p.requires_grad_()
    optimizer = CLASSES[name]([{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.0}], **settings)
    ratios, norms = [], []
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = numbers(*p.shape, seed=100 * step + i, scale=0.01 if i < len(params) - 1 else 0.0)
        optimizer.step()
        assert optimizer.grad_norm is not None
        ratios += [found for _, found in optimizer.ratios]
        norms.append(optimizer.grad_norm)
    state = [optimizer.state[p] for p in params]
    ends = {"params": [p.detach() for p in params], "ratios": ratios, "norms": norms}
    ends["xs"] = [s.get("master", p.detach()) for p, s in zip(params, state, strict=True)]
    return ends | {moment: [s[moment] for s in state] for moment in (*optimizer.moments, "step")}


def interpret(cases: Iterable[str] = QUICK) -> dict[str, Any]:
    """Trajectories by the kernels, put in the place of the lists of tensors; norms; and the tables of addresses."""
    from overnight.optim import kernels

    # The interpreter takes its time for each block, whatever its size.
    kernels.CHUNK, kernels.BLOCK = type(kernels.CHUNK)(32768), type(kernels.BLOCK)(16384)
    gather = Layerwise._gather

    def raw(optimizer: Layerwise) -> list[Batch]:
        batches = gather(optimizer)
        for batch in batches:
            batch.grads = [p.grad for p in batch.params if p.grad is not None]
            batch.backend = "lists"  # whose place the kernels take
        return batches

    def apply(optimizer: Layerwise, batch: Batch, xs: list[Tensor], moments: list[list[Tensor]], scalars: Any) -> Tensor:
        copies = [p for p in batch.params if p.dtype != xs[0].dtype]
        found = kernels.step(type(optimizer).update_direction.__name__, batch, xs, copies, moments, scalars, type(optimizer).step_sizes)
        for copy, x in zip(copies, xs, strict=False):
            # The interpreter cuts bf16 off where a GPU rounds it.
            off = (copy.float() - x).abs() / x.abs().clamp(min=1e-4)
            assert float(off.max()) < (2**-7 if copy.dtype == torch.bfloat16 else 2**-11), "the 16-bit parameter is not its master"
        return found

    Layerwise._gather, Layerwise._apply = raw, apply  # type: ignore[method-assign]
    layerwise.norms_of = lambda batch, parts: kernels.norms(parts, batch.shards)
    with np.errstate(invalid="ignore"):  # 0/0 beyond the end of a tensor
        found: dict[str, Any] = {case: trajectory(*CASES[case]) for case in cases}

    xs = [draw(size, seed=size, dtype=torch.float32) for size in SIZES]
    found["norms"] = kernels.norms(xs)
    # As if the other processes of two groups held as much again, four and nine times in all.
    kernels.dist.all_reduce = lambda squares, group: squares.mul_(group)  # type: ignore[assignment]
    found["norms of parts"] = kernels.norms(xs, shards=[4, 9])
    found["norms without a part"] = kernels.norms([torch.zeros(0), torch.full((4,), 2.0)]), kernels.norms([torch.zeros(0)])

    made = [torch.zeros(3) for _ in range(300)]
    found["tables"] = [int(kernels._addresses([x])) - x.data_ptr() for x in made], len(kernels._tables)
    kernels._capturing = lambda device: True
    seen, unseen = made[-1:], [torch.zeros(1), torch.zeros(1)]
    assert kernels._addresses(seen) is kernels._captured[-1]
    assert kernels._addresses(unseen).tolist() == [x.data_ptr() for x in unseen] and len(kernels._tables) == found["tables"][1]
    try:
        kernels._layout([torch.zeros(12345)])
    except RuntimeError as error:
        found["captured"] = str(error)
    return found


GPUS = (80, 90, 100)


def compile_all() -> dict[str, dict[str, int]]:
    """Accesses of four numbers at once in the machine code of each kernel for each GPU."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from overnight.optim import kernels

    fp32, bf16 = tl.float32, tl.bfloat16
    wanted = {
        "lamb moments": (kernels._move_moments, {"LANS": False, "ADAPT": True, "GRAD": fp32}),
        "lamb": (kernels._move, {"LANS": False, "GRAD": fp32, "COPY": None}),
        "lans moments": (kernels._move_moments, {"LANS": True, "ADAPT": True, "GRAD": fp32}),
        "lans": (kernels._move, {"LANS": True, "GRAD": fp32, "COPY": None}),
        "lans bf16": (kernels._move, {"LANS": True, "GRAD": bf16, "COPY": bf16}),
        "lars": (kernels._lars, {"NESTEROV": False, "GRAD": fp32, "COPY": None}),
        "norms": (kernels._square, {"KIND": fp32}),
        "total": (kernels._total, {}),
    }
    kinds = {"numbers": "*fp32", "partial": "*fp64", "totals": "*fp64", "eps": "fp32", "decay": "fp32", "momentum": "fp32"}
    found = {}
    for name, (kernel, flags) in wanted.items():
        signature = {arg: "constexpr" if arg in flags else kinds.get(arg, "*i64") for arg in kernel.arg_names}
        tables = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(arg),): value for arg, value in flags.items()}, tables)
        for gpu in GPUS:
            text = compile(source, target=GPUTarget("cuda", gpu, 32), options=kernels._OPTIONS).asm["ptx"]
            found[f"{name} {gpu}"] = {way: len(re.findall(rf"\b{way}\.global[.\w:]*\.v4\.", text)) for way in ("ld", "st")}
            found[f"{name} {gpu}"]["pairs"] = len(re.findall(r"\b(?:ld|st)\.global[.\w:]*\.v2\.", text))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(
        {"interpret": interpret, "interpret-all": partial(interpret, CASES), "compile": compile_all}[sys.argv[1]](), Path(sys.argv[2])
    )
