"""`overnight bench loop`: what the engine costs, compared with a bare PyTorch loop of the same network on the same batches.

The engine is `overnight pretrain` with all it does (reading, masking and dealing ahead in a thread, logging, guards, heartbeat); the bare loop
is forward, backward, clip, step on batches that lie ready. They take turns of ten steps in one process. Evaluation and checkpoints are not in it.
"""

from __future__ import annotations

import random
import string
import tempfile
import time
from collections.abc import Callable
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import torch

from overnight import config
from overnight.batches.packing import StepBatches
from overnight.bench.measure import Row, Timing, print_result, time_row
from overnight.bench.sizes import MODELS, VOCABULARY
from overnight.config import Run
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.engine.pretrain import pretrain
from overnight.engine.training_run import TrainingRun, set_up_machine

_TURN = 10
"""Steps of a turn."""
_LENGTH, _BATCH = 128, 32


def run(tiny: bool = False) -> None:
    """Measure and print the rows, JSON last."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure_loop(Path(folder), "bert-tiny" if tiny else "bert-mini", turns=3 if tiny else 13)]
    for row in rows:
        assert row.ratio is not None
        print(f"{row.name:20} {row.value:8.2f} ms a step  {row.peer} {row.peer_value:.2f} ms  overhead {100 / row.ratio - 100:+.2f} %")
    print_result("loop", rows)


def measure_loop(folder: Path, model: str, turns: int) -> Row:
    """Return the time of a step of the engine, and of the bare loop's (ms); the first two turns of both are not counted."""
    run = recipe(folder, model, turns * _TURN)
    prepare(run.data, run.data_dir, log=lambda text: None)
    bare = bare_loop(run)
    turn = _Turns(bare, turns)
    pretrain(run, turn)
    ours, theirs = (Timing(tuple(s / _TURN for s in seconds[2:])) for seconds in (turn.engine, turn.bare))
    return time_row("against bare loop", ours, "bare loop", theirs)


def recipe(folder: Path, model: str, steps: int) -> Run:
    """Return a run of full-size batches on random words, with a published vocabulary's size."""
    letters = product(string.ascii_lowercase, repeat=4)
    words = ["".join(next(letters)) for _ in range(VOCABULARY - 6)]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]) + "\n", encoding="utf-8")
    draw = random.Random(0)
    documents = (" ".join(" ".join(draw.choices(words, k=20)).capitalize() + "." for _ in range(20)) for _ in range(500))
    (folder / "text.txt").write_text("\n".join(documents), encoding="utf-8")
    return config.build_run(
        {
            "name": "loop",
            "out": str(folder / "run"),
            "data": {
                "paths": [str(folder / "text.txt")],
                "dir": str(folder / "data"),
                "documents": "line",
                "vocab_file": str(folder / "vocab.txt"),
                "vocab_size": VOCABULARY,
                "valid_fraction": 0.05,
            },
            "model": {name: getattr(MODELS[model], name) for name in ("num_layers", "hidden_size", "num_heads")},
            "phases": {
                "short": {
                    "steps": steps,
                    "global_batch_size": _BATCH,
                    "micro_batch_size": _BATCH,
                    "seq_len": _LENGTH,
                    "optim": {"name": "adamw", "lr": 1e-4, "schedule": {"name": "constant", "warmup_ratio": 0.0}},
                }
            },
            "logging": {"log_every": _TURN, "eval_every": 0, "eval_examples": 1},
            "checkpoint": {"save_every": steps + 1},
        }
    )


def bare_loop(run: Run) -> Callable[[int], float]:
    """Return a loop that takes ten steps from a given one on, and says how long they took (s)."""
    set_up_machine(run)
    work = TrainingRun(run, Line(StringIO()))
    (phase,) = run.phases.values()
    samples, net = work.workload.samples(phase, 0, "train"), work.model.train()
    decayed = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, eps=1e-6, fused=True)
    pad_to_multiple = max(64, phase.micro_batch_size * phase.seq_len // 64)

    def turn(first: int) -> float:
        ready: list[StepBatches] = [samples.step(step, pad_to_multiple=pad_to_multiple) for step in range(first, first + _TURN)]
        start = time.perf_counter()
        for step in ready:
            (batch,) = step.micro
            losses = net.losses(batch.to(work.device), torch.float32)[0]
            (losses["mlm"] / step.divisors()["mlm"] + losses["nsp"] / len(batch.targets["nsp"])).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if work.device.type == "cuda":  # the engine's turn ends with a line of metrics, which waits for the device, too
            torch.cuda.synchronize(work.device)
        return time.perf_counter() - start

    return turn


class _Turns(Line):
    """The engine's line of progress, at which the bare loop takes its turn and the engine waits."""

    def __init__(self, bare: Callable[[int], float], turns: int) -> None:
        super().__init__(StringIO())
        self._bare, self._turns = bare, turns
        self.engine: list[float] = []
        self.bare: list[float] = []
        self._start = time.perf_counter()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.engine.append(time.perf_counter() - self._start)
        self.bare.append(self._bare(len(self.bare) * _TURN))
        self._start = time.perf_counter()
