"""`overnight bench optim`: a step of LAMB, LANS and LARS compared with torch's fused AdamW, a hand-written LAMB, and the bytes they must move.

The tensors are those of a BERT: tables, matrices, and as many vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from overnight.bench.measure import Row, Timing, measure, printed, rate_row, time_row
from overnight.bench.sizes import MODELS, VOCABULARY, fitting
from overnight.errors import UserError
from overnight.models.bert import BertForPretraining
from overnight.optim import Lamb, Lans, Lars
from overnight.optim.batch import why_lists
from overnight.optim.layerwise import Layerwise

# Bytes a step must move for a parameter with fp32 x, g, m, v: LAMB reads g for its norm, then g, x, m, v and writes m, v, then reads
# x, m, v and writes x.
BYTES = {"LAMB": 44, "LANS": 48, "LARS": 28, "AdamW": 28}
CLASSES: dict[str, Callable[..., Layerwise]] = {"LAMB": Lamb, "LANS": Lans, "LARS": Lars}

# Steps between two waits for a GPU.
_IN_A_ROW = 10
# 24.3 M parameters in 206 tensors, 336 M in 302, and the smallest.
CPU, LARGE, TINY = "bert-24m", "bert-large", "bert-tiny"


def run(tiny: bool = False) -> None:
    """Measure every case and print the rows, JSON last."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if why := why_lists(device):
        raise UserError(f"bench optim: has no fast step of LAMB, LANS and LARS to measure on this {device.type}: {why}")
    with printed("optim") as rows:
        for case in [TINY] if tiny else [CPU, LARGE] if device.type == "cuda" else [CPU]:
            found = fitting(f"optimizers of {case}", device, partial(measure_case, case, device, repeats=2 if tiny else 15))
            rows += found
            for row in found:
                against = f"  {row.peer} {row.peer_value:.4g} {row.unit}, ratio {row.ratio:.2f}" if row.ratio else ""
                print(f"{row.name:44} {row.value:9.4g} {row.unit}{against}", flush=True)


def shapes(name: str) -> list[torch.Size]:
    """Return the shapes of the parameters of a network."""
    with torch.device("meta"):
        return [p.shape for p in BertForPretraining(MODELS[name], VOCABULARY).parameters()]


def tensors(name: str, device: torch.device) -> list[Tensor]:
    """Return seeded parameters with gradients."""
    generator = torch.Generator(device).manual_seed(0)
    params = []
    for shape in shapes(name):
        p = (0.02 * torch.randn(shape, generator=generator, device=device)).requires_grad_()
        p.grad = 0.01 * torch.randn(shape, generator=generator, device=device)
        params.append(p)
    return params


def groups(params: Sequence[Tensor], trust_ratio: bool = True) -> list[dict[str, Any]]:
    """Return matrices and tables, and vectors, which are not decayed (and not adapted, where the optimizer has that setting)."""
    vectors: dict[str, Any] = {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}
    return [{"params": [p for p in params if p.ndim > 1]}, vectors | {"trust_ratio": False} if trust_ratio else vectors]


def measure_case(case: str, device: torch.device, repeats: int = 15) -> list[Row]:
    """Time steps of all optimizers on the tensors of a case, taking turns; on a GPU ten between two waits, as training waits for none."""
    wait, in_a_row = (torch.cuda.synchronize, _IN_A_ROW) if device.type == "cuda" else (None, 1)
    warmup, repeats = (1, -(-repeats // 3)) if in_a_row > 1 else (3, repeats)
    # For a CPU this needs a C compiler, for a GPU Triton; `fused` says clearly what is missing.
    steps: dict[str, Callable[[], object]] = {
        "fused AdamW": torch.optim.AdamW(groups(tensors(case, device), trust_ratio=False), fused=True).step
    }
    steps["LAMB as written"] = eager_lamb(tensors(case, device))
    for name, make in CLASSES.items():
        for how, fused in (("fused", True), ("foreach", False)):
            steps[f"{name} {how}"] = make(groups(tensors(case, device)), fused=fused).step
    count = sum(shape.numel() for shape in shapes(case))
    # y + x into y, as large as the optimizer's tensors. Not a copy: a CPU reads what it is about to overwrite, which a copy's count leaves
    # out. Not zeros: pages that were never written are all one page.
    x, y = (torch.ones(2 * count, device=device) for _ in range(2))
    many = {name: partial(_repeated, function, in_a_row) for name, function in {"memory": lambda: y.add_(x), **steps}.items()}
    found = measure(many, warmup=warmup, repeats=repeats, sync=wait)
    times = {name: Timing(tuple(seconds / in_a_row for seconds in timing.seconds)) for name, timing in found.items()}
    memory = rate_row(f"{case}: memory", "GB/s", 3 * x.nbytes / 1e9, times["memory"])
    rows = [memory]
    bounds = {name: Timing((size * count / (memory.value * 1e9),)) for name, size in BYTES.items()}
    adamw = times["fused AdamW"]
    rows.append(time_row(f"{case}: fused AdamW, bytes", adamw, f"{BYTES['AdamW']} bytes a parameter", bounds["AdamW"]))
    for name in CLASSES:
        ours = times[f"{name} fused"]
        rows.append(time_row(f"{case}: {name} fused", ours, "fused AdamW", adamw))
        rows.append(time_row(f"{case}: {name} fused, bytes", ours, f"{BYTES[name]} bytes a parameter", bounds[name]))
        rows.append(time_row(f"{case}: {name} foreach", times[f"{name} foreach"], "fused AdamW", adamw))
    written = times["LAMB as written"]
    rows.append(time_row(f"{case}: LAMB fused, by hand", times["LAMB fused"], "eager, tensor by tensor", written))
    if device.type == "cuda":
        rows += [Row(f"{case}: {name} syncs in a step", syncs(make, case, device), "steps") for name, make in CLASSES.items()]
    return rows


def _repeated(function: Callable[[], object], count: int) -> None:
    for _ in range(count):
        function()


def syncs(make: Callable[..., Layerwise], case: str, device: torch.device) -> float:
    """Return 1 if a step waits for the device, else 0."""
    optimizer = make(groups(tensors(case, device)), fused=True)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
        return 0.0
    except RuntimeError:
        return 1.0
    finally:
        torch.cuda.set_sync_debug_mode("default")


def eager_lamb(params: Sequence[Tensor]) -> Callable[[], None]:
    """Return LAMB as one writes it by hand: the paper's formulas, tensor by tensor."""
    state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in params]
    steps = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal steps
        steps += 1
        for p, (m, v) in zip(params, state, strict=True):
            g = p.grad
            assert g is not None
            m.mul_(0.9).add_(g, alpha=0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            m_hat = m / (1 - 0.9**steps)
            v_hat = v / (1 - 0.999**steps)
            u = m_hat / (v_hat.sqrt() + 1e-6) + 0.01 * p
            norm_p, norm_u = p.norm(), u.norm()
            trust = torch.where((norm_p > 0) & (norm_u > 0), norm_p / norm_u, 1.0)
            p.add_(u * trust, alpha=-1e-3)

    return step
