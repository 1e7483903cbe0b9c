"""Launches of Triton from where the code calls it, for tests/gpu/test_launches.py: `python -m tests.gpu.launches_worker FILE CAPABILITY TYPE...`.

Triton's own way to a launch, for a GPU that is not there: arguments are looked at, the kernel is compiled to machine code, and only the launch does nothing.
"""

from __future__ import annotations

from tests.gpu import fake_cuda  # first of all

# isort: split
import json
import sys
from typing import Any

import torch

from overnight.config import BertConfig
from overnight.models import bert
from overnight.models.attention import Layout
from overnight.optim import Lamb, Lars
from tests.gpu.steps_worker import CUDA, faked, prepared, step

SIZES = [(3, 7), (40000,), (1,)]


def optimizer(make: Any, dtype: torch.dtype) -> None:
    """Take two steps of tensors of 16 and of 32 bits."""
    params = [torch.zeros(size, device=CUDA, dtype=dtype).requires_grad_() for size in SIZES]
    made = make(params, lr=0.01)
    for _ in range(2):
        for p in params:
            p.grad = torch.zeros_like(p)
        made.step()


def layer(dtype: torch.dtype) -> None:
    """Take a fused layer forward and back, of the width of BERT-base: a row is no power of two."""
    with CUDA:
        net = bert.Layer(BertConfig(attention_dropout=0.1))
        x = torch.empty(300, 768, dtype=dtype, requires_grad=True)
        where = Layout(torch.empty(5, dtype=torch.int32), 128, True)
    net.fused = True
    net(x, where).sum().backward()


if __name__ == "__main__":
    capability = (int(sys.argv[2][0]), int(sys.argv[2][1]))
    fake_cuda.install(capability)
    torch.set_num_threads(1)
    driver, mode, given, found = fake_cuda.drive(capability), faked(), {kind: prepared(kind) for kind in ("mlstm", "bert")}, {}
    with mode:
        for name, make, dtype in (
            ("lamb fp32", Lamb, torch.float32),
            ("lamb bf16", Lamb, torch.bfloat16),
            ("lars fp32", Lars, torch.float32),
        ):
            optimizer(make, dtype)
            found[name], driver.launched = driver.launched, []
        step(given["mlstm"], "mlstm", "adamw", "none")
        found["mlstm bf16"], driver.launched = driver.launched, []
        step(given["bert"], "bert fused", "adamw", "none")
        found["bert bf16"], driver.launched = driver.launched, []
        for name in sys.argv[3:]:
            layer({"bf16": torch.bfloat16, "fp16": torch.float16}[name])
            found[f"layer {name}"], driver.launched = driver.launched, []
    fake_cuda.end(sys.argv[1], json.dumps(found, indent=1))
