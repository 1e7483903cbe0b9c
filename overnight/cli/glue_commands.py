"""Fine-tuning all tasks with one command, and the files for the server of GLUE."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from overnight.cli.recipe_commands import Add, said_once
from overnight.cli.task_keys import add_source, check_keys, open_run, task_overrides, with_published
from overnight.config.load import stored_run
from overnight.config.schema import BertRun, Finetune
from overnight.config.validate import environment_path
from overnight.display import for_stream, plural
from overnight.errors import ConfigError, DataError, UserError


def finetune_all(options: argparse.Namespace, overrides: list[str]) -> None:
    """Fine-tune every task of the recipe, or with --path every one of GLUE that lies there, and print one table; what is done is not done again."""
    given = next((text.partition("=")[2] for text in overrides if text.startswith("path=")), "")
    rest = [text for text in overrides if not text.startswith("path=")]
    with said_once():
        run = open_run(options, (), BertRun)
        from overnight.download.datasets import GLUE_FOLDERS
        from overnight.finetune.glue import suite_table, task_folders

        folders, absent = task_folders(environment_path(given, "finetune.path")) if given else ({}, [])
        names = list(folders if given else run.finetune)
        if not names:
            where = (
                f"{given}: holds none of the folders {', '.join(GLUE_FOLDERS.values())}" if given else "the recipe of the run has no tasks"
            )
            raise ConfigError(f"{where}; name the folder that holds GLUE with --path=")
        runs = {}
        for name in names:
            own = with_published(run, name, [f"path={folders[name]}", *rest] if given else rest)
            runs[name] = stored_run(Path(options.source), task_overrides(Finetune, name, own, name in run.finetune))
    from overnight.distributed.world import is_first, world_size
    from overnight.finetune.finetune import finetune
    from overnight.report.page import refresh_report

    if absent:
        print(f"left out, without a file to train on: {', '.join(absent)}")
    failed: dict[str, str] = {}
    for name, each in runs.items():
        assert isinstance(each, BertRun)
        try:
            finetune(each, name)
        except UserError as error:
            # Of several processes only all together can continue; and what keeps two tasks alike from being trained is no matter of either.
            if world_size() > 1 or str(error) in failed.values():
                raise
            failed[name] = str(error)
            print(for_stream(f"{name}: is left out: {error}", sys.stderr), file=sys.stderr)
    if not is_first():  # which may still be writing what would be read
        return
    folder = shlex.quote(str(run.run_dir))
    after = f"\nnext:\n  overnight submission --from {folder} --to glue.zip" if given else ""
    if scored := [name for name in names if name not in failed]:  # what others have is of other rows or settings
        print(for_stream(f"{suite_table(run.run_dir, scored)}\n{refresh_report(run.run_dir)}{after}", sys.stdout))
    if failed:
        raise DataError(
            f"{len(failed)} of {plural(len(names), 'task')} could not be fine-tuned: {', '.join(failed)}; the errors are above. Correct them and give the same command again, which skips the tasks that are done"
        )


def add_submission(add: Add) -> None:
    """Add the command."""
    command = add("submission", _submission, "write the answers of fine-tuned GLUE tasks in the format of the GLUE server", keys=True)
    add_source(command, what="run folder")
    command.add_argument("--to", required=True, metavar="DIR", help="folder to write CoLA.tsv, MNLI-m.tsv, ..., AX.tsv into, or a .zip")


def _submission(options: argparse.Namespace, overrides: list[str]) -> None:
    check_keys(options.command, overrides)
    run = open_run(options, overrides, BertRun)
    from overnight.finetune.glue import write_submission

    print("\n".join(write_submission(run.run_dir, Path(options.to))))
