"""The commands of byte models. Nothing heavy is imported until one runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

from overnight.cli.task_keys import task_overrides
from overnight.config.schema import LinearProbe
from overnight.display import duration, for_stream, number, plural
from overnight.errors import ConfigError

TAKE_OVERRIDES = ("evaluate", "linear-probe", "extract-features", "heatmap", "generate")
"""Commands that take keys of a recipe: `linear-probe` those of its task, the others such as `--precision=bf16`."""
_FEATURES = get_args(get_type_hints(LinearProbe)["features"])


def add_byte_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands to the command line; `add` takes a name, a function of options and overrides, and a summary."""

    def model(verb: argparse.ArgumentParser) -> argparse.ArgumentParser:
        verb.add_argument(
            "--from",
            dest="source",
            required=True,
            metavar="RUN",
            help="run folder or exported folder; --precision=bf16 and the like follow",
        )
        return verb

    verb = model(add("evaluate", _evaluate, "bits per character of a byte model"))
    verb.add_argument("--split", choices=("test", "valid", "train"), default="test", help="which documents; default test")
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--shards", type=int, default=16, metavar="N", help="read N random shards side by side; default 16")
    how.add_argument("--whole", action="store_true", help="read every document")
    summary = "evaluate a byte model's features on a task of its recipe, or on a new one (sst, imdb, csv) given by --path"
    verb = model(add("linear-probe", _linear_probe, summary, keys=LinearProbe))
    verb.add_argument("task", metavar="TASK", help="a task of the recipe; sst, imdb, csv; or a name of your own for what --path names")
    verb = model(add("extract-features", _extract_features, "texts to features of a byte model, as .npy"))
    verb.add_argument("--input", required=True, metavar="FILE", help="csv, tsv, json, JSON lines, or plain lines; - is standard input")
    verb.add_argument("--to", required=True, metavar="FILE", help="array to write, .npy")
    verb.add_argument("--features", default="cell", choices=_FEATURES, metavar="WHAT", help=f"one of {', '.join(_FEATURES)}; default cell")
    verb.add_argument("--field", default="text", help="column or key of the texts; default text")
    verb = model(add("heatmap", _heatmap, "one HTML page with a unit's value at every character"))
    verb.add_argument(
        "--unit",
        required=True,
        metavar="N",
        help="which cell, from 0; `best` is the unit that the newest linear probe found, a cell or hidden state",
    )
    verb.add_argument("--input", required=True, metavar="FILE", help="as of extract-features")
    verb.add_argument("--to", required=True, metavar="FILE", help="page to write")
    verb.add_argument("--field", default="text", help="column or key of the texts; default text")
    verb.add_argument("--tanh", action="store_true", help="show tanh of the cell, which is -1 to 1")
    verb = model(add("generate", _generate, "text from a byte model"))
    verb.add_argument("--prompt", default="", metavar="TEXT", help="text to continue")
    verb.add_argument("--length", type=int, default=500, metavar="N", help="bytes to write; default 500")
    verb.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest byte; default 1")
    verb.add_argument("--seed", type=int, default=0, metavar="S", help="the same writes the same; default 0")
    verb.add_argument("--unit", metavar="N", help="a cell to hold at --value, from 0; `best` as of heatmap")
    verb.add_argument("--value", type=float, metavar="V", help="at which the unit is held")
    verb = add(
        "import",
        _import,
        "a byte model of OpenAI (folder of .npy) or NVIDIA (checkpoint file) as a folder that the commands take by --from",
    )
    verb.add_argument("--from", dest="source", required=True, metavar="PATH", help="folder or file")
    verb.add_argument("--to", required=True, metavar="DIR", help="folder to write")


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.byte_lm.evaluate import evaluate
    from overnight.checkpoint.run_corpus import find_data
    from overnight.interop.byte_models import stored_run

    run = stored_run(Path(options.source), overrides)
    if not any(override.startswith("data.dir=") for override in overrides):  # else it is to be measured on that, whatever it is
        run = find_data(run)
    found = evaluate(run, options.split, None if options.whole else options.shards)
    print(f"{number(found.bits, 4)} bits per character over {found.characters:,} bytes of {options.split} in {duration(found.seconds)}")


def _linear_probe(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.interop.byte_models import stored_run

    name, folder = options.task, Path(options.source)
    known = name in stored_run(folder).linear_probe
    run = stored_run(folder, task_overrides(LinearProbe, name, [o.removeprefix("--") for o in overrides], known))
    from overnight.byte_lm.linear_probe import linear_probe
    from overnight.report.summary import summary_text

    linear_probe(run, name)
    if (folder / "run.yaml").exists():
        from overnight.report.page import refresh_report

        print(for_stream(f"{summary_text(folder)}\n{refresh_report(folder)}", sys.stdout))


def _extract_features(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.byte_lm.features import extract_features, features_file, read_texts, write_features
    from overnight.corpus.bytes import document_bytes
    from overnight.interop.byte_models import ready_model

    to = features_file(options.to)
    texts = read_texts(options.input, options.field)
    model, dtype = ready_model(Path(options.source), overrides)
    found = extract_features(model, [document_bytes(text) for text in texts], options.features, dtype)
    write_features(to, found)
    print(f"written: {to} ({plural(found.shape[0], 'text')}, {plural(found.shape[1], 'feature')}, float32)")


def _heatmap(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.byte_lm.features import read_texts
    from overnight.byte_lm.heatmap import chosen_unit, unit_values
    from overnight.interop.byte_models import ready_model
    from overnight.report.heatmap import write_heatmap

    folder, to = Path(options.source), Path(options.to)
    texts, unit = read_texts(options.input, options.field), chosen_unit(folder, options.unit)
    model, dtype = ready_model(folder, overrides)
    what = f"{'tanh of ' if options.tanh else ''}{unit} of {folder.resolve().name}"
    lead = "The unit's value after each character, read from the beginning of each text."
    write_heatmap(to, [unit_values(model, text, unit, options.tanh, dtype) for text in texts], what, lead)
    print(f"written: {to}")


def _generate(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.byte_lm.generate import generate
    from overnight.byte_lm.heatmap import chosen_unit
    from overnight.interop.byte_models import ready_model

    if (options.unit is None) != (options.value is None):
        raise ConfigError("--unit and --value belong together: which unit, and at what it is held")
    folder = Path(options.source)
    held = None if options.unit is None else (chosen_unit(folder, options.unit), options.value)
    model, dtype = ready_model(folder, overrides)
    print(options.prompt, end="")
    for piece in generate(model, options.prompt, options.length, options.temperature, options.seed, held, dtype):
        print(piece, end="", flush=True)
    print()


def _import(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.interop.byte_models import import_byte_model

    model = import_byte_model(Path(options.source), Path(options.to))
    print(f"written: {options.to} ({model.kind}, {plural(model.num_layers, 'layer')} of {model.hidden_size})")
