"""The command that evaluates a model: a run of any kind, or a masked language model in the Hugging Face layout."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overnight.cli.recipe_commands import Add
from overnight.cli.task_keys import add_source, check_keys, open_encoder, open_run, warn_if_slow
from overnight.config.data import Data
from overnight.config.schema import BertRun, ByteRun, Run
from overnight.display import duration, for_stream, measures, number, plural, scale_of
from overnight.errors import ConfigError

if TYPE_CHECKING:
    from overnight.console import Line
    from overnight.evaluation.masked_lm import MaskedLM
    from overnight.evaluation.texts import Text
    from overnight.inference.model import Model

_ENCODERS = ("text", "seq_len", "blimp", "pairs")
_BYTES = ("groups", "whole")
_ROWS = ("task", "rows", "to")


def add_evaluate(add: Add) -> None:
    """Add the command."""
    summary = "measure an encoder's masked-LM loss, bits per character and BLiMP score, or its tasks' scores on more rows; or a byte model's bits per byte"
    command = add("evaluate", _evaluate, summary, keys=True)
    add_source(command)
    text = "documents to evaluate on; default valid for encoders, which have no test split, and test for byte models"
    command.add_argument("--split", choices=("test", "valid", "train"), help=text)
    text = "encoders: measure bits per character and masked accuracy on this raw text (any source that data.paths takes) instead of the run's own"
    command.add_argument("--text", nargs="+", metavar="FILE", help=text)
    text = "encoders: use about N tokens of the text, drawn by a hash; default 200000. Byte models: read about N bytes, the first of each group; default all"
    command.add_argument("--max-tokens", type=int, metavar="N", help=text)
    text = "encoders: cut the text into sequences of at most N tokens; default 128, the length at which all models are compared"
    command.add_argument("--seq-len", type=int, metavar="N", help=text)
    command.add_argument("--blimp", metavar="PATH", help="encoders: score minimal pairs from blimp.tar.xz or a folder with data/*.jsonl")
    command.add_argument("--pairs", type=int, metavar="N", help="BLiMP: score N pairs per paradigm, drawn by a hash; default 100, 0 is all")
    text = "encoders: score this fine-tuned task on the rows of --rows"
    command.add_argument("--task", metavar="NAME", help=text)
    text = "labeled rows: a table with the columns of the task (or --columns.text=NAME, --columns.label=NAME), a file of GLUE or SST, words with tags (.conll, .jsonl), questions (.json)"
    command.add_argument("--rows", metavar="FILE", help=text)
    command.add_argument("--to", metavar="FOLDER", help="with --rows: write predictions.json, errors.json and similar files to this folder")
    command.add_argument("--json", metavar="FILE", help="also write the results to this file")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--groups", type=int, metavar="N", help="byte models: read N random groups of documents in parallel; default 16")
    how.add_argument("--whole", action="store_true", help="byte models: read every document, as encoders always do")


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> None:
    named = ("blimp", "json", *_ROWS)
    for name, given in (("text", options.text or []), *((name, [getattr(options, name)]) for name in named)):
        if "" in given:  # an empty variable of a shell
            raise ConfigError(f"--{name} = '': name a file")
    if options.json and Path(options.json).is_dir():
        raise ConfigError(f"--json = {options.json}: is a folder; name the file to write")
    if options.pairs is not None and (options.pairs < 0 or options.pairs == 1):
        raise ConfigError(f"--pairs = {options.pairs}: must be 2 or more, for a standard error, or 0 for all")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise ConfigError(f"--max-tokens = {options.max_tokens}: must be 1 or more")
    if options.seq_len is not None and options.seq_len < 8:
        raise ConfigError(f"--seq-len = {options.seq_len}: must be 8 or more")
    if options.seq_len is not None and options.blimp and not (options.text or options.split):
        raise ConfigError(
            f"--seq-len = {options.seq_len}: applies to a text, and BLiMP consists of single sentences; name a text with --text or --split"
        )
    if options.pairs is not None and not options.blimp:
        raise ConfigError(f"--pairs = {options.pairs}: needs --blimp=PATH, the pairs to score")
    folder = Path(options.source)
    begin = time.perf_counter()
    if any(getattr(options, name) for name in _ROWS):
        _finish(options, _evaluate_rows(options, overrides), begin)
        return
    if columns := [override for override in overrides if override.startswith("columns.")]:
        raise ConfigError(f"--{columns[0]}: names a column of the rows to score a task on; name them with --rows=FILE")
    if (folder / "config.json").is_file() and not (folder / "run.yaml").is_file():
        from overnight.evaluation.huggingface import is_huggingface

        if is_huggingface(folder):
            _finish(options, _evaluate_folder(options, overrides, folder), begin)
            return
    run = open_run(options, overrides, Run)
    from overnight.config.validate import refuse_int8
    from overnight.distributed.world import device_of

    refuse_int8(run)
    warn_if_slow(run.precision, device_of(run))
    if isinstance(run, BertRun):
        _finish(options, _evaluate_encoder(options, overrides, run), begin)
    else:
        assert isinstance(run, ByteRun)
        _finish(options, _evaluate_bytes(options, overrides, run), begin)


def _finish(options: argparse.Namespace, found: dict[str, Any], begin: float) -> None:
    if options.json:
        from overnight.run_dir.atomic import write_json

        write_json(Path(options.json), {**found, "seconds": round(time.perf_counter() - begin, 3)})
        print(f"written: {options.json}")


def _refuse(options: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if (value := getattr(options, name)) is not None and value is not False:  # 0 is given too
            raise ConfigError(f"--{name.replace('_', '-')} = {value}: {why}")


def _with_data(run: Run, overrides: list[str]) -> Run:
    from overnight.checkpoint.run_corpus import fetched, find_data

    # A folder that is named is to be measured on, whatever it is.
    return fetched(run) if _names_data(overrides) else find_data(run)


def _names_data(overrides: list[str]) -> bool:
    return any(override.startswith("data.dir=") for override in overrides)


def _evaluate_rows(options: argparse.Namespace, overrides: list[str]) -> dict[str, Any]:
    """Score a fine-tuned task on a file of labeled rows."""
    _refuse(
        options,
        ("split", "max_tokens", *_ENCODERS, *_BYTES),
        "measures a language model, and --task, --rows and --to score a task; run the command twice",
    )
    if not options.rows:
        raise ConfigError(f"--{'task' if options.task else 'to'} = {options.task or options.to}: name the rows to score on, --rows=FILE")
    to = Path(options.to) if options.to else None
    if to and to.exists() and not to.is_dir():
        raise ConfigError(f"--to = {to}: is a file; name a folder")
    from overnight.console import Line
    from overnight.finetune.answer_files import write_files
    from overnight.finetune.scoring import score_file
    from overnight.report.task_errors import found_errors

    columns = [override for override in overrides if override.startswith("columns.")]
    model = _task_to_score(options, [override for override in overrides if override not in columns])
    name, path, begin = options.task or model.task, Path(options.rows), time.perf_counter()
    with Line() as line:
        score = score_file(model.trained, path, line, _columns(columns))
    for note in score.notes:
        print(f"{path}: {note}")
    scale = scale_of(model.trained.facts["spec"]["task"])
    print(f"{name}, {plural(score.rows, 'row')} of {path}: {measures(score.metrics, scale)} in {duration(time.perf_counter() - begin)}")
    if score.largest_class is not None:
        print(f"commonest class of these rows: {measures({'accuracy': score.largest_class})}")
    for text in found_errors(score.files["errors.json"], f"in {to / 'errors.json'}" if to else "with --to=FOLDER"):
        print(for_stream(text, sys.stdout))
    if to:
        write_files(to, score.files)
        print(f"written: {to} ({', '.join(score.files)})")
    return {"task": name, "rows": score.rows, **score.metrics}


def _columns(overrides: list[str]) -> dict[str, str]:
    """Return what the columns of a table are called, as a task of fine-tuning would read it."""
    from overnight.config import machine_run

    try:
        run = machine_run(["finetune.rows.task=csv", "finetune.rows.path=rows", *(f"finetune.rows.{override}" for override in overrides)])
    except ConfigError as error:
        raise ConfigError(str(error).replace("finetune.rows.", "")) from None
    assert isinstance(run, BertRun)
    return vars(run.finetune["rows"].columns)


def _task_to_score(options: argparse.Namespace, overrides: list[str]) -> Model:
    from overnight.interop.imported import import_folder

    check_keys(options.command, overrides)
    task = options.task or ""
    if task and not (Path(options.source) / "run.yaml").is_file():
        if (import_folder(options.source) / "finetune" / task / "task.json").is_file():  # it was imported, and fine-tuned
            open_run(options, overrides, BertRun)
        else:
            task = ""
    model = open_encoder(options, overrides, task, reads=options.task or "")
    if model.kind == "mask":
        have = f"--task=NAME, of {', '.join(model.tasks)}" if model.tasks else "`overnight finetune` makes one"
        raise ConfigError(f"{options.source}: is a pretrained model, and only a fine-tuned task can score rows: {have}")
    if options.task and not task:
        print(f"{options.source}: {options.task} is answered by its own head ({', '.join([model.kind, *model.labels])})", file=sys.stderr)
    return model


def _evaluate_bytes(options: argparse.Namespace, overrides: list[str], run: ByteRun) -> dict[str, Any]:
    _refuse(options, _ENCODERS, "is for masked language models; for a byte model, name a split")
    from overnight.byte_lm.evaluate import evaluate
    from overnight.console import Line

    found = _with_data(run, overrides)
    assert isinstance(found, ByteRun)
    split, groups = options.split or "test", None if options.whole else 16 if options.groups is None else options.groups
    with Line() as line:
        score = evaluate(found, split, groups, options.max_tokens, line)
    print(f"{number(score.bits, 4)} bits per byte over {score.bytes:,} bytes of {split} in {duration(score.seconds)}")
    return {"split": split, "bits_per_byte": score.bits, "byte_accuracy": score.accuracy, "bytes": score.bytes}


def _evaluate_encoder(options: argparse.Namespace, overrides: list[str], run: BertRun) -> dict[str, Any]:
    """Measure what is named: a text, BLiMP, a split; where nothing is, the validation split."""
    _refuse(options, _BYTES, "only a byte model reads groups; BERT reads every document")
    from overnight.console import Line
    from overnight.evaluation.masked_lm import RunMaskedLM
    from overnight.evaluation.results import keep_results
    from overnight.evaluation.texts import MAX_TOKENS, text_of_shards

    line, more, texts = Line(), {}, _texts(options, overrides)
    if options.split or not (options.text or options.blimp):
        from overnight.engine.evaluate import evaluate

        found, split = _with_data(run, overrides), options.split or "valid"
        assert isinstance(found, BertRun)
        score = evaluate(found, split, line)
        line.clear()
        text = f"{plural(score.documents, 'document')} ({plural(score.examples, 'example')} of phase {score.phase})"
        print(f"{split}: {measures(score.metrics)} over {text} in {duration(score.seconds)}")
        more = {"split": {"name": split, "phase": score.phase, "examples": score.examples, **score.metrics}}
        texts.append(text_of_shards(found.data_dir, split, max_tokens=options.max_tokens or MAX_TOKENS, own=not _names_data(overrides)))
    result = _measure(options, RunMaskedLM(run), texts, run.run_dir / "evaluation", line)
    keep_results(run.run_dir, result["details"], line)
    if options.text:
        _warn_of_training_text(run, _given_text(options, overrides))
    return {**result, **more}


def _evaluate_folder(options: argparse.Namespace, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Measure a model in the Hugging Face layout on raw text, on the text of prepared data, or on BLiMP."""
    _refuse(options, _BYTES, "only a byte model reads groups of documents")
    check_keys(options.command, overrides)
    from overnight.checkpoint.run_corpus import fetched
    from overnight.config import machine_run
    from overnight.console import Line
    from overnight.distributed.world import device_of
    from overnight.evaluation.huggingface import HuggingFaceMaskedLM
    from overnight.evaluation.texts import MAX_TOKENS, text_of_shards

    machine, texts = machine_run(overrides), _texts(options, overrides)
    warn_if_slow(machine.precision, device_of(machine))
    if _names_data(overrides):
        texts.append(
            text_of_shards(fetched(machine).data_dir, options.split or "valid", max_tokens=options.max_tokens or MAX_TOKENS, own=False)
        )
    elif options.split:
        raise ConfigError(f"--split = {options.split}: {folder} has no data of its own; name prepared data with --data.dir=FOLDER")
    if not texts and not options.blimp:
        raise ConfigError(f"{folder}: name what to measure it on: --text FILE, --data.dir=FOLDER (prepared data) or --blimp PATH")
    # Beside the folder, since transformers and `overnight export` know what is in it.
    beside = folder.resolve().with_name(f"{folder.resolve().name}.evaluation")
    return _measure(options, HuggingFaceMaskedLM(folder, machine), texts, beside, Line())


def _texts(options: argparse.Namespace, overrides: list[str]) -> list[Text]:
    """Return the raw text that is named: read alike for every model, whatever a run's own recipe says of its text."""
    if not options.text:
        return []
    from overnight.evaluation.texts import MAX_TOKENS, text_of_files

    return [text_of_files(_given_text(options, overrides), options.max_tokens or MAX_TOKENS)]


def _given_text(options: argparse.Namespace, overrides: list[str]) -> Data:
    from overnight.config import machine_run

    data = machine_run([override for override in overrides if override.startswith("data.")]).data
    return dataclasses.replace(data, paths=options.text, sources={})


def _warn_of_training_text(run: BertRun, text: Data) -> None:
    """Say of how many documents the score means nothing, where the data of the run is at hand."""
    from overnight.checkpoint.run_corpus import find_data
    from overnight.corpus.places import is_remote
    from overnight.errors import DataError
    from overnight.evaluation.trained_on import trained_on

    try:
        if is_remote(run.data.dir) or not (folder := find_data(run).data_dir).is_dir():
            return
        count, of = trained_on(dataclasses.replace(text, documents=run.data.documents), run.data, folder)
    except DataError:  # it is not, or no more as it was
        return
    if count:
        print(
            f"warning: {count:,} of {plural(of, 'document')} of --text {'is' if count == 1 else 'are'} text that it was trained on, word for word: scores there say little about other text"
        )


def _measure(options: argparse.Namespace, model: MaskedLM, texts: list[Text], folder: Path, line: Line) -> dict[str, Any]:
    from overnight.evaluation.evaluate import PAIRS, Requested, evaluate_model
    from overnight.evaluation.masked import SEQ_LEN
    from overnight.evaluation.results import flat_results
    from overnight.report.evaluation_text import results_lines

    if options.seq_len is not None and options.seq_len > model.longest:
        raise ConfigError(f"--seq-len = {options.seq_len}: must be at most {model.longest}, as many positions as {options.source} has")
    blimp, pairs = Path(options.blimp).expanduser() if options.blimp else None, PAIRS if options.pairs is None else options.pairs
    found = evaluate_model(model, Requested(tuple(texts), blimp, pairs, options.seq_len or SEQ_LEN), folder, line)
    for text in results_lines(found):
        line.print(text)
    return flat_results(found)
