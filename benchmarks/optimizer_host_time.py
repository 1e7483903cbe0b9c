"""What a step of the optimizers takes of the host of a GPU: Python and the calls of torch, without the kernels; needs no GPU.

    python -m benchmarks.optimizer_host_time            BERT-base, about half a minute on one core

The step is the one of a GPU, of tensors of four elements on the CPU, so that arithmetic takes next to nothing: LAMB, LANS and LARS
prepare everything for their Triton kernels, whose launches are left out, and torch's fused AdamW takes its whole step. The optimizers
take turns; the table has medians of the CPU time of a step and the quartiles. With a GPU the launches come on top, some ten for LAMB.
Into benchmarks/results/<date>-<machine>-optimizer-host-time/ goes result.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from overnight.bench.sizes import MODELS, VOCABULARY
from overnight.config import LambConfig
from overnight.models.bert import BertForPretraining
from overnight.optim import Lamb, Lans, Lars, batch, kernels
from overnight.optim.groups import parameter_groups
from overnight.run_dir.environment import environment


class _NotLaunched:
    """A kernel whose launch does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **flags: None


def groups(model: str) -> list[dict[str, Any]]:
    """Return groups of as many tensors as those of a network, with four elements each, and gradients of ones."""
    with torch.device("meta"):
        network = BertForPretraining(MODELS[model], VOCABULARY)
    made = []
    for group in parameter_groups(network, LambConfig(weight_decay=0.01)):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in group["params"]]
        for p in params:
            p.grad = torch.ones(4)
        made.append({"params": params, "weight_decay": group["weight_decay"], "trust_ratio": group["trust_ratio"]})
    return made


def measure(model: str, rounds: int) -> dict[str, Any]:
    """Return microseconds of a step of each optimizer: the median and both quartiles."""
    batch.fastest = lambda *args, **more: "kernels"  # type: ignore[assignment]
    for name in ("_move_moments", "_move", "_lars", "_square", "_total"):
        setattr(kernels, name, _NotLaunched())
    made = groups(model)
    plain = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in made]
    optimizers: dict[str, torch.optim.Optimizer] = {
        "LAMB": Lamb(made, max_grad_norm=1.0),
        "LANS": Lans(made),
        "LARS": Lars(made),
        "AdamW, fused": torch.optim.AdamW(plain, fused=True),
    }
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for i in range(rounds):
        for name, optimizer in optimizers.items():
            start = time.process_time_ns()
            optimizer.step()
            if i >= 3:  # the first ones make the state and the tables
                times[name].append((time.process_time_ns() - start) / 1e3)
    rows = {name: dict(zip(("lower", "median", "upper"), statistics.quantiles(found, n=4), strict=True)) for name, found in times.items()}
    return {"model": model, "tensors": sum(len(group["params"]) for group in made), "groups": len(made), "rounds": rounds - 3, "us": rows}


def main() -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["bert-base"], metavar="MODEL", help=f"of {', '.join(MODELS)}; default bert-base")
    parser.add_argument("--rounds", type=int, default=1000, help="steps of each optimizer (default 1,000)")
    parser.add_argument("--machine", default=f"cpu{os.cpu_count()}", help="word for the machine in the name of the results folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(model, options.rounds) for model in options.models]
    for row in rows:
        adamw = row["us"]["AdamW, fused"]["median"]
        print(f"{row['model']}: {row['tensors']} tensors in {row['groups']} groups")
        for name, us in row["us"].items():
            print(
                f"  {name:14}{us['median'] / 1e3:7.2f} ms  ({us['lower'] / 1e3:.2f} to {us['upper'] / 1e3:.2f}){us['median'] / adamw:8.2f} of AdamW's"
            )
    out = Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-optimizer-host-time"
    out.mkdir(parents=True, exist_ok=True)
    result = {"command": ["python", "-m", "benchmarks.optimizer_host_time", *sys.argv[1:]], "environment": environment(), "rows": rows}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
