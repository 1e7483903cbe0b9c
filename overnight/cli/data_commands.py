"""The commands about a prepared folder: data report, data look, data overlap, data diff."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from overnight.cli.recipe_commands import Add


def _add_data(add: Add) -> None:
    command = add("data", _report, "see what was prepared: report, look, overlap, diff")
    kinds = command.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add_kind(name: str, function: Callable[..., int | None], summary: str) -> argparse.ArgumentParser:
        kind = kinds.add_parser(
            name, help=summary, description=summary, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        kind.set_defaults(function=function, parser=kind)
        return kind

    _add_report(add_kind("report", _report, "one HTML page about a prepared folder"))
    _add_look(add_kind("look", _look, "read and search the documents of a prepared folder, decoded"))
    _add_overlap(add_kind("overlap", _overlap, "which evaluations a prepared folder has text of; ends with 1 where it has some"))
    _add_diff(add_kind("diff", _diff, "what differs between two prepared folders; ends with 1 where something does"))


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
    command.add_argument("--split", choices=("train", "valid", "test"), default="train", help="default: train")
    command.add_argument(
        "--number",
        type=count,
        nargs="+",
        metavar="N",
        help="these documents, counted from 1, without --random, --search, --regex or --source",
    )
    command.add_argument("--random", type=count, default=0, metavar="N", help="so many at random (default: 3, where nothing is searched)")
    command.add_argument("--seed", type=seed, default=0, metavar="S", help="of the random documents (default: 0)")
    command.add_argument("--search", metavar="TEXT", help="those with this text, however its white space is")
    command.add_argument("--regex", metavar="PATTERN", help="those in whose decoded text this regular expression is found")
    command.add_argument("--ignore-case", action="store_true", help="capital and small letters are the same to a search")
    command.add_argument("--source", metavar="TEXT", help="those in whose name, source or entry of data.paths this stands")
    command.add_argument("--limit", type=count, metavar="N", help="stop after so many (default: 20 of a search or a source)")
    command.add_argument("--characters", type=count, default=1000, metavar="N", help="of each document (default: 1000)")
    command.add_argument("--whole", action="store_true", help="all of each document")
    command.add_argument("--sentences", action="store_true", help="a sentence a line, numbered")
    command.add_argument("--tokens", action="store_true", help="the tokens with their ids, a sentence a line")
    command.add_argument("--json", action="store_true", help="one JSON object a document instead of text")


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
        help="files, folders, globs and archives of evaluations, as of data.decontaminate",
    )
    command.add_argument("--words", type=count, default=13, metavar="N", help="in a row that count as shared (default: 13)")
    command.add_argument("--split", choices=("train", "valid", "test"), default="train", help="default: train")
    command.add_argument("--samples", type=number, default=5, metavar="N", help="documents that are shown (default: 5)")
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _overlap(options: argparse.Namespace, overrides: list[str]) -> int:
    from overnight.cli.data_overlap import overlap

    return overlap(options)


def _add_diff(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", metavar="A", help="a prepared folder")
    command.add_argument("other", metavar="B", help="another one")
    command.add_argument("--samples", type=number, default=3, metavar="N", help="documents of each kind that are shown (default: 3)")
    command.add_argument("--json", action="store_true", help="one JSON object instead of text")


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
