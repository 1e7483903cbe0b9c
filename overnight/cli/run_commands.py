"""The commands that take a run of any kind: finetune, predict, export, evaluate, report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from overnight.cli.evaluate_command import add_evaluate
from overnight.cli.glue_commands import add_submission, finetune_all
from overnight.cli.recipe_commands import Add, said_once
from overnight.cli.task_keys import (
    SOURCES,
    KeysHelp,
    add_source,
    check_keys,
    next_commands,
    open_encoder,
    open_run,
    open_task,
    open_to_answer,
)
from overnight.config.schema import BertRun, ByteRun, Finetune, Run
from overnight.display import for_stream, plural, width_of
from overnight.errors import ConfigError, DataError

if TYPE_CHECKING:
    from overnight.finetune.predict import Trained


def _add_finetune(add: Add) -> None:
    summary = "fine-tune a pretrained run on a task of its recipe, or on a new one given with --path"
    command = add("finetune", _finetune, summary, keys=True, add_help=False, usage="overnight finetune TASK --from RUN [--KEY=VALUE ...]")
    command.add_argument(
        "task",
        metavar="TASK",
        help="a task of the recipe; squad, cola, mrpc, rte, stsb, sst2, qnli, wnli, mnli, qqp, sst, imdb, csv, tokens (words with tags), docnames; or a name of your own for the data at --path; `all` is every task of the recipe, or of the GLUE folder at --path",
    )
    add_source(command, BertRun)
    command.add_argument("-h", "--help", action=KeysHelp, const=Finetune)


def _finetune(options: argparse.Namespace, overrides: list[str]) -> None:
    if options.task == "all":
        finetune_all(options, overrides)
        return
    with said_once():
        run = open_task(options, overrides, BertRun, Finetune)
    from overnight.distributed.world import is_first
    from overnight.finetune.finetune import finetune
    from overnight.report.page import refresh_report
    from overnight.report.summary import tasks_text
    from overnight.report.task_errors import errors_lines

    finetune(run, options.task)
    if not is_first():  # which may still be writing what would be read
        return
    said = [tasks_text(run.run_dir, options.task, width_of(sys.stdout)), *errors_lines(run.run_dir / "finetune" / options.task)]
    print(for_stream("\n".join([*said, refresh_report(run.run_dir), next_commands(run.run_dir, options.task)]), sys.stdout))


def _add_predict(add: Add) -> None:
    summary = "predict on a table, JSON lines or text with a fine-tuned or probed task, or fill in [MASK]"
    command = add("predict", _predict, summary, keys=True)
    command.add_argument("task", metavar="TASK", help="a fine-tuned task of the run, or `mask`; for a byte model, a task of `linear-probe`")
    add_source(command)
    command.add_argument(
        "--input",
        default="-",
        metavar="FILE",
        help="a table (.csv, .tsv, .jsonl, .parquet) with the columns of the task, questions in SQuAD's format (.json), or lines of text (a pair separated by a tab) or JSON; default: standard input; without an `id`, the id of a table row is its number, from 0, and that of a line its number, from 1",
    )
    text = "format of the input: a table, or lines; default: by the file extension, and lines for standard input"
    command.add_argument("--format", choices=("csv", "tsv", "jsonl", "parquet", "lines"), default="", help=text)
    command.add_argument(
        "--to",
        metavar="FILE",
        help="file to write; default and -: print; answers to questions in a .json are {id: text}, as SQuAD's scripts read them; a FOLDER/ also gets the n best answers and the null odds",
    )


def _predict(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.finetune.answer_files import check_output, write_answers

    to = check_output(options.to)
    model = _task_of_others(options, overrides)
    run = None if model else open_to_answer(options, overrides, Run)
    from overnight.finetune.predict import answer_file, load_trained, write_question_files

    if isinstance(run, BertRun):
        model = load_trained(run, options.task)
    if model is not None:
        if to and (options.to.endswith("/") or to.is_dir()):
            write_question_files(model, options.input, to, options.format)
            return
        answers = answer_file(model, options.input, form=options.format)
    else:
        assert run is not None
        from overnight.byte_lm.classify import classify_file

        answers = classify_file(run, options.task, options.input, form=options.format)
    if broken := write_answers(answers, to):
        raise DataError(f"{plural(broken, 'line')} could not be answered; each says why in its place")


def _task_of_others(options: argparse.Namespace, overrides: list[str]) -> Trained | None:
    """Return the task that a Hugging Face folder has a head of; none where a task of that name was fine-tuned in the run folder it was imported as."""
    source, path = options.source, Path(options.source)
    config = path / "config.json"
    if options.task == "mask" or not (source.startswith("hf:") or (config.is_file() and not (path / "run.yaml").is_file())):
        return None
    check_keys("predict", overrides)
    from overnight.interop.huggingface import head_of
    from overnight.interop.imported import import_folder
    from overnight.interop.sources import HUB, hub_folder

    if (import_folder(source) / "finetune" / options.task / "task.json").is_file():
        return None
    kind, labels = head_of(hub_folder(source) if source.startswith(HUB) else path)
    if kind is None:
        return None
    # Standard output is the answers.
    print(f"{source}: {options.task} is answered by its own head ({', '.join([kind, *labels])})", file=sys.stderr)
    return open_encoder(options, overrides).trained


def _add_export(add: Add) -> None:
    command = add("export", _export, "write a model in the Hugging Face layout; a byte model as safetensors with its settings", keys=True)
    add_source(command, what=SOURCES[BertRun])
    command.add_argument("--to", required=True, metavar="DIR", help="folder to write")
    command.add_argument("--task", metavar="TASK", help="export this fine-tuned task instead of the pretrained model")
    command.add_argument("--license", metavar="ID", default="", help="encoders: license that the model card states, such as apache-2.0")
    text = "encoders: onnx also writes model.onnx, checked with onnxruntime (needs the extra `onnx`)"
    command.add_argument("--format", choices=("huggingface", "onnx"), default="huggingface", help=text)


def _export(options: argparse.Namespace, overrides: list[str]) -> None:
    run = open_run(options, overrides, Run)
    if isinstance(run, BertRun):
        from overnight.interop.export import export_run

        export_run(run, Path(options.to), options.task, options.license, options.format == "onnx")
    elif options.format == "onnx":
        raise ConfigError("--format = onnx: a byte model is exported as safetensors alone; leave it out")
    elif options.task:
        raise ConfigError(f"--task = {options.task!r}: a byte model has no fine-tuned tasks")
    elif not (run.run_dir / "run.yaml").is_file():
        raise ConfigError(f"{options.source} is an exported model already; name its run folder")
    else:
        from overnight.interop.byte_models import export_byte_model

        assert isinstance(run, ByteRun)
        export_byte_model(run, Path(options.to))
    print(f"written: {options.to}")


def _add_report(add: Add) -> None:
    command = add("report", _report, "write an HTML page from the metrics of one or more runs")
    command.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    command.add_argument("--to", metavar="FILE", help="page to write; default report.html in the first run folder")


def _report(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.report.page import write_report

    runs = [Path(run) for run in options.runs]
    print(f"written: {write_report(runs, Path(options.to) if options.to else runs[0] / 'report.html')}")


COMMANDS = (_add_finetune, _add_predict, add_submission, _add_export, add_evaluate, _add_report)
