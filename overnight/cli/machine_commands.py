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
    "loader": "tokens a second that one core makes into batches",
    "optim": "a step of LAMB, LANS and LARS, compared with torch's fused AdamW",
    "mlstm": "forward and backward pass of the multiplicative LSTM, compared with autograd",
    "scaling": "a step of data-parallel training on 1, 2 and 4 processes",
    "gpu": "what one GPU does, in under nine minutes",
    "roof": "matrix products and copies of this machine, and the least time of a step that follows",
    "corpus": "raw text to shards, compared with pure Python",
    "infer": "a classifier on a CPU, compared with transformers' pipeline and onnxruntime",
}


def _add_bench(add: Add) -> None:
    command = add("bench", _bench, "benchmark against reference implementations; the last line is one JSON object")
    wide = max(map(len, _BENCHMARKS))
    command.epilog = "\n".join(["benchmarks:", *(f"  {name:{wide}}  {text}" for name, text in _BENCHMARKS.items())])
    command.add_argument("what", choices=_BENCHMARKS, metavar="WHAT", help="what to measure, one of the benchmarks below")
    command.add_argument(
        "--peer", choices=("transformers", "none"), help="of train, mlstm, corpus and infer: with whom to compare; none measures ours alone"
    )
    command.add_argument("--tiny", action="store_true", help="smallest sizes, to see that it runs")
    command.add_argument("--json", type=Path, metavar="FILE", dest="file", help="of gpu and roof: also write the JSON to this file")
    command.add_argument(
        "--precision",
        choices=("fp32", "tf32", "bf16", "fp16"),
        help="of roof: of what is measured (default: 16 bits on a GPU, fp32 on a CPU)",
    )
    command.add_argument(
        "--table",
        action="store_true",
        default=None,
        dest="table_only",
        help="of roof: only the least times on known GPUs, from data sheets",
    )
    corpus = command.add_argument_group("corpus")
    corpus.add_argument("--size", type=float, metavar="MB", help="of the text, its first megabytes; 0: all (default)")
    corpus.add_argument(
        "--text", metavar="PATH", help="as in data.paths (default: the books of $OVERNIGHT_DATA, else the documentation of Python)"
    )
    corpus.add_argument(
        "--times", type=int, nargs="*", metavar="N", help="how many times the text memory is measured with, too (default: 4)"
    )
    corpus.add_argument("--workers", type=int, metavar="N", help="processes (default: one for each core)")


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
    add("recipes", _recipes, "the shipped recipes")


def _recipes(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.config import recipes
    from overnight.console import table

    rows = [(name, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")) for name, path in recipes().items()]
    print(for_stream(table(rows, left=2), sys.stdout))


def _add_completion(add: Add) -> None:
    command = add("completion", _completion, 'a script that completes commands, recipes and keys: eval "$(overnight completion bash)"')
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="for which shell")


def _completion(options: argparse.Namespace, overrides: list[str]) -> None:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["overnight"], shell=options.shell))


COMMANDS = (add_download, _add_bench, _add_doctor, _add_recipes, _add_completion)
