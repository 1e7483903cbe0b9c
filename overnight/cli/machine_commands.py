"""The commands that need neither a recipe nor a run: download, bench, doctor, recipes, completion."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from overnight.cli.download_command import add_download
from overnight.cli.recipe_commands import Add
from overnight.display import for_stream
from overnight.errors import ConfigError

_BENCHMARKS = {
    "train": "training throughput, compared with transformers",
    "loop": "the cost of the engine, compared with a bare PyTorch loop",
    "loader": "tokens per second that one core turns into batches",
    "optim": "a step of LAMB, LANS and LARS, compared with torch's fused AdamW",
    "mlstm": "forward and backward pass of the multiplicative LSTM, compared with autograd",
    "scaling": "a step of data-parallel training on 1, 2 and 4 processes",
    "gpu": "performance of one GPU, in under nine minutes",
    "roof": "speed of this machine's matrix products and copies, and the minimum step time that follows",
    "corpus": "raw text to shards, compared with pure Python",
    "infer": "a classifier on a CPU, compared with transformers' pipeline and onnxruntime",
}


def _add_bench(add: Add) -> None:
    command = add("bench", _bench, "benchmark against reference implementations; the last line is one JSON object")
    wide = max(map(len, _BENCHMARKS))
    command.epilog = "\n".join(["benchmarks:", *(f"  {name:{wide}}  {text}" for name, text in _BENCHMARKS.items())])
    command.add_argument("what", choices=_BENCHMARKS, metavar="WHAT", help="what to measure, one of the benchmarks below")
    command.add_argument(
        "--peer",
        choices=("transformers", "none"),
        help="train, mlstm, corpus, infer: program to compare with; none measures overnight alone",
    )
    command.add_argument("--tiny", action="store_true", help="use the smallest sizes, to check that it runs")
    command.add_argument("--json", type=Path, metavar="FILE", dest="file", help="gpu, roof: also write the JSON to this file")
    command.add_argument(
        "--precision",
        choices=("fp32", "tf32", "bf16", "fp16"),
        help="roof: precision to measure (default: 16 bits on a GPU, fp32 on a CPU)",
    )
    command.add_argument(
        "--table",
        action="store_true",
        default=None,
        dest="table_only",
        help="roof: show only the minimum step times on known GPUs, from data sheets",
    )
    corpus = command.add_argument_group("corpus")
    corpus.add_argument("--size", type=float, metavar="MB", help="use only the first MB megabytes of the text; 0: all (default)")
    corpus.add_argument(
        "--text",
        metavar="PATH",
        help="text to prepare, as in data.paths (default: the books of $OVERNIGHT_DATA, else the Python documentation)",
    )
    corpus.add_argument(
        "--times", type=int, nargs="*", metavar="N", help="also measure speed and memory with N times the text (default: 4)"
    )
    corpus.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")


_OF_SOME = {
    "peer": ("train", "mlstm", "corpus", "infer"),
    "size": ("corpus",),
    "text": ("corpus",),
    "times": ("corpus",),
    "workers": ("corpus",),
    "file": ("gpu", "roof"),
    "precision": ("roof",),
    "table_only": ("roof",),
}
"""Options of some benchmarks alone."""


def _bench(options: argparse.Namespace, overrides: list[str]) -> None:
    given = {name: value for name in _OF_SOME if (value := getattr(options, name)) is not None}
    for name in given:
        if options.what not in _OF_SOME[name]:
            option = {"file": "json", "table_only": "table"}.get(name, name)
            *some, last = (f"`overnight bench {what}`" for what in _OF_SOME[name])
            several = f"{', '.join(some)} and {last}" if some else last
            raise ConfigError(f"--{option}: belongs to {several} alone; leave it out")
    import_module(f"overnight.bench.{options.what}").run(tiny=options.tiny, **given)


def _add_doctor(add: Add) -> None:
    add("doctor", _doctor, "check hardware and dependencies")


def _doctor(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.cli.doctor import doctor

    print(doctor())


def _add_recipes(add: Add) -> None:
    add("recipes", _recipes, "list the shipped recipes")


def _recipes(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.config import recipes
    from overnight.console import table

    rows = [(name, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")) for name, path in recipes().items()]
    print(for_stream(table(rows, left=2), sys.stdout))


def _add_completion(add: Add) -> None:
    command = add(
        "completion", _completion, 'print a script that completes commands, recipes and keys: eval "$(overnight completion bash)"'
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to complete in")


def _completion(options: argparse.Namespace, overrides: list[str]) -> None:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["overnight"], shell=options.shell))


COMMANDS = (add_download, _add_bench, _add_doctor, _add_recipes, _add_completion)
