"""The commands of byte models alone: linear-probe, extract-features, heatmap, generate; and import, which also takes encoders."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args, get_type_hints

from overnight.cli.recipe_commands import Add
from overnight.cli.task_keys import KeysHelp, add_source, open_task, open_to_answer
from overnight.config.schema import ByteRun, LinearProbe
from overnight.display import for_stream, plural, unsteered, width_of
from overnight.errors import ConfigError, DataError

_FEATURES = get_args(get_type_hints(LinearProbe)["features"])


def _add_linear_probe(add: Add) -> None:
    summary = "evaluate a byte model's features on a task of its recipe, or on a new one (sst, imdb, csv) given with --path"
    usage = "overnight linear-probe TASK --from RUN [--KEY=VALUE ...]"
    command = add("linear-probe", _linear_probe, summary, keys=True, add_help=False, usage=usage)
    command.add_argument(
        "task", metavar="TASK", help="a task of the recipe; sst, imdb or csv; or a name of your own for the data at --path"
    )
    add_source(command, ByteRun)
    command.add_argument("-h", "--help", action=KeysHelp, const=LinearProbe)


def _linear_probe(options: argparse.Namespace, overrides: list[str]) -> None:
    run = open_task(options, overrides, ByteRun, LinearProbe)
    from overnight.byte_lm.linear_probe import linear_probe
    from overnight.report.summary import tasks_text

    linear_probe(run, options.task)
    if (run.run_dir / "run.yaml").exists():
        from overnight.report.page import refresh_report

        print(for_stream(f"{tasks_text(run.run_dir, options.task, width_of(sys.stdout))}\n{refresh_report(run.run_dir)}", sys.stdout))


def _add_extract_features(add: Add) -> None:
    command = add("extract-features", _extract_features, "compute a byte model's features of texts, as .npy", keys=True)
    add_source(command, ByteRun)
    command.add_argument(
        "--input", required=True, metavar="FILE", help="texts: csv, tsv, json, JSON lines, or plain lines; - is standard input"
    )
    command.add_argument("--to", required=True, metavar="FILE", help="array to write (.npy)")
    command.add_argument(
        "--features", default="cell", choices=_FEATURES, metavar="WHAT", help=f"one of {', '.join(_FEATURES)}; default cell"
    )
    command.add_argument("--field", default="text", help="column or key of the texts; default text")


def _extract_features(options: argparse.Namespace, overrides: list[str]) -> None:
    run = open_to_answer(options, overrides, ByteRun)
    from overnight.byte_lm.features import extract_features, features_file, read_texts, write_features
    from overnight.corpus.bytes import document_bytes
    from overnight.interop.byte_models import ready_model

    to = features_file(options.to)
    texts = read_texts(options.input, options.field)
    model, dtype = ready_model(run)
    found = extract_features(model, [document_bytes(text) for text in texts], options.features, dtype)
    write_features(to, found)
    print(f"written: {to} ({plural(found.shape[0], 'text')}, {plural(found.shape[1], 'feature')}, float32)")


def _add_heatmap(add: Add) -> None:
    command = add("heatmap", _heatmap, "write an HTML page with a unit's value at every character", keys=True)
    add_source(command, ByteRun)
    command.add_argument(
        "--unit",
        required=True,
        metavar="N",
        help="number of a cell, from 0; `best` is the best unit of the newest linear probe, a cell or a hidden state",
    )
    command.add_argument("--input", required=True, metavar="FILE", help="texts, as in extract-features")
    command.add_argument("--to", required=True, metavar="FILE", help="page to write")
    command.add_argument("--field", default="text", help="column or key of the texts; default text")
    command.add_argument("--tanh", action="store_true", help="show the tanh of the cell (-1 to 1)")


def _heatmap(options: argparse.Namespace, overrides: list[str]) -> None:
    run = open_to_answer(options, overrides, ByteRun)
    from overnight.byte_lm.features import read_texts
    from overnight.byte_lm.heatmap import chosen_unit, unit_values
    from overnight.interop.byte_models import ready_model
    from overnight.report.heatmap import write_heatmap

    to = Path(options.to)
    if to.is_dir():
        raise ConfigError(f"--to = {to}: is a folder; name a page to write, such as unit.html")
    texts, unit = read_texts(options.input, options.field), chosen_unit(run.run_dir, options.unit)
    model, dtype = ready_model(run)
    what = f"{'tanh of ' if options.tanh else ''}{unit} of {run.run_dir.resolve().name}"
    lead = "The unit's value after each character, read from the beginning of each text."
    write_heatmap(to, [unit_values(model, text, unit, options.tanh, dtype) for text in texts], what, lead)
    print(f"written: {options.to}")


def _add_generate(add: Add) -> None:
    command = add("generate", _generate, "generate text with a byte model", keys=True)
    add_source(command, ByteRun)
    command.add_argument("--prompt", default="", metavar="TEXT", help="text to continue")
    command.add_argument("--length", type=int, default=500, metavar="N", help="number of bytes to generate; default 500")
    command.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="sampling temperature; 0 always takes the likeliest byte; default 1"
    )
    command.add_argument("--seed", type=int, default=0, metavar="S", help="random seed; the same seed gives the same text; default 0")
    command.add_argument("--unit", metavar="N", help="cell to hold at --value: its number, from 0, or `best` as in heatmap")
    command.add_argument("--value", type=float, metavar="V", help="value at which to hold the cell")


def _generate(options: argparse.Namespace, overrides: list[str]) -> None:
    if (options.unit is None) != (options.value is None):
        raise ConfigError("--unit and --value must be given together: the unit, and the value to fix it at")
    run = open_to_answer(options, overrides, ByteRun)
    from overnight.byte_lm.generate import generate
    from overnight.byte_lm.heatmap import chosen_unit
    from overnight.interop.byte_models import ready_model

    held = None if options.unit is None else (chosen_unit(run.run_dir, options.unit), options.value)
    model, dtype = ready_model(run)
    pieces = generate(model, options.prompt, options.length, options.temperature, options.seed, held, dtype)
    first = next(pieces, "")  # what is wrong with the numbers or the prompt is said before anything is printed
    prompt = options.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    print(unsteered(prompt + first, sys.stdout), end="", flush=True)
    for piece in pieces:
        print(unsteered(piece, sys.stdout), end="", flush=True)
    print()


def _add_import(add: Add) -> None:
    summary = "convert another program's model into a folder that --from accepts: BERT or ModernBERT from Hugging Face, BERT from Google or NVIDIA, a byte model from OpenAI (folder of .npy) or NVIDIA"
    command = add("import", _import, summary)
    command.add_argument("--from", dest="source", required=True, metavar="PATH", help="folder or file, or hf:NAME on the Hugging Face Hub")
    command.add_argument("--to", required=True, metavar="DIR", help="folder to write")


def _import(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.interop.byte_models import import_byte_model
    from overnight.interop.imported import import_encoder
    from overnight.interop.sources import OF_OTHERS, is_source

    if is_source(options.source):
        run, notes = import_encoder(options.source, Path(options.to))
        sizes = f"{run.model.kind}, {plural(run.model.num_layers, 'layer')} of {run.model.hidden_size}, {run.data.vocab_size:,} tokens"
        print("\n".join([f"written: {options.to} ({sizes})", *notes]))
        return
    path = Path(options.source)
    if not path.is_file() and not (path / "0.npy").exists():
        what = "holds no model that can be converted" if path.exists() else "does not exist"
        raise DataError(
            f"{path}: {what}; name {OF_OTHERS}; or of byte models OpenAI's folder (0.npy to 14.npy) or a checkpoint file of sentiment-discovery"
        )
    model = import_byte_model(path, Path(options.to))
    print(f"written: {options.to} ({model.kind}, {plural(model.num_layers, 'layer')} of {model.hidden_size})")


COMMANDS = (_add_linear_probe, _add_extract_features, _add_heatmap, _add_generate, _add_import)
