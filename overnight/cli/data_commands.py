"""The commands about a prepared folder: data report, data look, data overlap, data diff."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from overnight.cli.recipe_commands import Add


def _add_data(add: Add) -> None:
    command = add("data", _report, "inspect prepared data: report, look, overlap, diff")
    kinds = command.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add_kind(name: str, function: Callable[..., int | None], summary: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(
            name, help=summary, description=summary, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        kind.set_defaults(function=function, parser=kind)
        return kind

    _add_report(add_kind("report", _report, "write an HTML page about a prepared folder"))
    _add_look(add_kind("look", _look, "read and search the decoded documents of a prepared folder"))
    _add_overlap(add_kind("overlap", _overlap, "find text of evaluations in a prepared folder; exits with 1 if there is some"))
    _add_diff(add_kind("diff", _diff, "compare two prepared folders; exits with 1 if they differ"))


def _add_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="FOLDER", help="a prepared folder, such as data/demo")


def _add_report(command: argparse.ArgumentParser) -> None:
    _add_folder(command)
    command.add_argument("--to", metavar="FILE", help="page to write; default report.html in the folder")


def _report(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.corpus.prepared import local_folder
    from overnight.report.data_page import write_data_report

    folder = local_folder(options.folder)
    print(f"written: {write_data_report(folder, Path(options.to) if options.to else folder / 'report.html')}")


def _add_look(command: argparse.ArgumentParser) -> None:
    _add_folder(command)
    command.add_argument("--split", choices=("train", "valid", "test"), default="train", help="split to read (default: train)")
    command.add_argument(
        "--number",
        type=count,
        nargs="+",
        metavar="N",
        help="show these documents, counted from 1; not with --random, --search, --regex or --source",
    )
    command.add_argument(
        "--random", type=count, default=0, metavar="N", help="show N random documents (default: 3, if no option chooses others)"
    )
    command.add_argument("--seed", type=seed, default=0, metavar="S", help="seed of --random (default: 0)")
    command.add_argument("--search", metavar="TEXT", help="show documents that contain this text; white space may differ")
    command.add_argument("--regex", metavar="PATTERN", help="show documents whose decoded text matches this regular expression")
    command.add_argument("--ignore-case", action="store_true", help="ignore case in a search")
    command.add_argument("--source", metavar="TEXT", help="show documents with this text in their name, source or data.paths entry")
    command.add_argument("--limit", type=count, metavar="N", help="stop after N documents (default: 20 for a search or a source)")
    command.add_argument("--characters", type=count, default=1000, metavar="N", help="characters to show of each document (default: 1000)")
    command.add_argument("--whole", action="store_true", help="show each document in full")
    command.add_argument("--sentences", action="store_true", help="show one numbered sentence per line")
    command.add_argument("--tokens", action="store_true", help="show tokens with their ids, one sentence per line")
    command.add_argument("--json", action="store_true", help="print one JSON object per document instead of text")


def _look(options: argparse.Namespace, overrides: list[str]) -> int:
    from overnight.cli.data_look import look

    return look(options)


def _add_overlap(command: argparse.ArgumentParser) -> None:
    # argparse would show FOLDER last, where it would be one more PATH.
    command.usage = "%(prog)s FOLDER --with PATH [PATH ...] [--words N] [--split {train,valid,test}] [--samples N] [--json]"
    _add_folder(command)
    command.add_argument(
        "--with",
        dest="paths",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, globs and archives of evaluations, as in data.decontaminate",
    )
    command.add_argument("--words", type=count, default=13, metavar="N", help="words in a row that count as shared text (default: 13)")
    command.add_argument("--split", choices=("train", "valid", "test"), default="train", help="split to search (default: train)")
    command.add_argument("--samples", type=number, default=5, metavar="N", help="documents to show (default: 5)")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _overlap(options: argparse.Namespace, overrides: list[str]) -> int:
    from overnight.cli.data_overlap import overlap

    return overlap(options)


def _add_diff(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="A", help="a prepared folder")
    command.add_argument("other", metavar="B", help="another prepared folder")
    command.add_argument("--samples", type=number, default=3, metavar="N", help="documents of each kind to show (default: 3)")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _diff(options: argparse.Namespace, overrides: list[str]) -> int:
    from overnight.cli.data_diff import diff

    return diff(options)


def count(text: str, least: int = 1) -> int:
    """Return a number on the command line; argparse names this function where it is none."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"must be {least} or more")
    return value


def number(text: str) -> int:
    """Return a number on the command line that may be 0; argparse names this function where it is none."""
    return count(text, 0)


def seed(text: str) -> int:
    """Return a seed on the command line: 0 or more."""
    return count(text, 0)


COMMANDS = (_add_data,)
