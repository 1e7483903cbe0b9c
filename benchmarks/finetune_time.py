"""How much of a fine-tuning is spent in the network, and what the rest is.

    python -m benchmarks.finetune_time sst2 --from runs/mine --path=glue/SST-2 --max_train_examples=800 --epochs=1
    python -m benchmarks.finetune_time squad --from runs/mine --path=squad --seq_len=384 --max_train_examples=200 --epochs=1

Runs `overnight finetune` with the same words in this process, on a copy of the run folder, and measures processor time of each thread, so that other work of the
machine does not count. On a CPU only, with one thread (--compute.threads=1 is added). Prints a table; `--json FILE` writes it too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from overnight.checkpoint.writer import CheckpointWriter
from overnight.cli import main as command_line
from overnight.console import table
from overnight.display import share
from overnight.engine import loop
from overnight.finetune import finetune, seed
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.models.heads import Classifier, QuestionAnswering, TokenClassifier
from overnight.report import page

NETWORK = ("forward", "backward", "optimizer", "scoring")
"""What counts as time in the network."""


class Clock:
    """Processor time by what is done (s); what is inside something else counts as that."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._inside = threading.local()

    def timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def call(*args: Any, **named: Any) -> Any:
            outer = getattr(self._inside, "of", "")
            if outer in NETWORK:
                return function(*args, **named)
            self._inside.of, before, start = what, getattr(self._inside, "timed", 0.0), time.thread_time()
            self._inside.timed = 0.0
            try:
                return function(*args, **named)
            finally:
                took = time.thread_time() - start
                # Without what was timed inside, which has its own name.
                self.spent[what] += took - self._inside.timed
                self._inside.of, self._inside.timed = outer, before + took

        return call


def measure(words: list[str]) -> dict[str, Any]:
    """Fine-tune as the words of a command line say; return the seconds by what was done, and the share of the network."""
    clock = Clock()
    for kind in (Classifier, TokenClassifier, QuestionAnswering):
        kind.losses = clock.timed("forward", kind.losses)  # type: ignore[method-assign]
        kind.forward = clock.timed("scoring", kind.forward)  # type: ignore[method-assign]
    torch.Tensor.backward = clock.timed("backward", torch.Tensor.backward)  # type: ignore[assignment]
    for place, name, what in (
        (loop, "clip_and_step", "optimizer"),
        (finetune, "encode_task", "reading and encoding"),
        (EncodedExamples, "batch", "batches"),
        (EncodedExamples, "drawn", "batches"),
        (CheckpointWriter, "save", "checkpoints"),
        (CheckpointWriter, "_write_in_thread", "checkpoints"),
        (seed, "outputs", "outputs"),
        (seed, "TrainingRun", "making the network"),
        (page, "refresh_report", "report"),
    ):
        setattr(place, name, clock.timed(what, getattr(place, name)))
    started = time.process_time()
    code = command_line.main(["finetune", *words, "--compute.device=cpu", "--compute.threads=1"])
    if code:
        raise SystemExit(code)
    total = time.process_time() - started
    network = sum(clock.spent[what] for what in NETWORK)
    return {
        "seconds": {**clock.spent, "the rest": total - clock.spent.total()},
        "total": total,
        "network": network,
        "share": network / total,
        "imports": started,
    }


def text(found: dict[str, Any]) -> str:
    """Return the table of what was measured."""
    rows = [["processor time", "s", "share"]]
    for what, seconds in sorted(found["seconds"].items(), key=lambda item: (item[0] not in NETWORK, -item[1])):
        rows.append([what, f"{seconds:.2f}", share(seconds / found["total"])])
    rows.append(["in the network", f"{found['network']:.2f}", share(found["share"])])
    rows.append(["outside", f"{found['total'] - found['network']:.2f}", share(1 - found["share"])])
    return f"{table(rows)}\nbesides {found['imports']:.1f} s until Python had imported all"


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--from", dest="source", type=Path, required=True, help="run folder; it is copied")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    options, rest = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(options.source, copy, ignore=shutil.ignore_patterns("finetune", "tasks.jsonl", "plans"))
        found = measure([options.task, "--from", str(copy), *rest])
    print(text(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
