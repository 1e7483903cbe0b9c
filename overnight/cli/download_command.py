"""The command that gets public text and tasks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from overnight.cli.recipe_commands import Add
from overnight.display import for_stream
from overnight.download.datasets import DATASETS, GLUE_FOLDERS, RemoteFile
from overnight.errors import ConfigError

if TYPE_CHECKING:
    from overnight.download.selection import Choice

_EXAMPLES = """examples:
  overnight download --list
  overnight download squad glue --task cola mrpc --to data
  overnight download wikipedia --language simple --date latest --to data
  overnight download amazon --category Digital_Music Musical_Instruments --year 2014
  overnight download gutenberg --ids 1342 2701 --mirror https://mirror.example.org/data
"""


def add_download(add: Add) -> None:
    """Add the command."""
    summary = "download public text and tasks, resumed and checked: Wikipedia, SQuAD, GLUE, IMDB, Amazon reviews, Project Gutenberg, BLiMP"
    command = add("download", _download, summary, epilog=_EXAMPLES)
    command.add_argument("dataset", nargs="*", metavar="NAME", help=f"what to download: {', '.join(DATASETS)}")
    command.add_argument(
        "--to", metavar="FOLDER", help="folder to write to; default $OVERNIGHT_DATA, where the recipes look, else the folder data"
    )
    text = "list what there is, with license and citation; with NAME ..., list every file, or those that the other options select"
    command.add_argument("--list", action="store_true", help=text)
    command.add_argument("--language", metavar="CODE", help="wikipedia: language: en, de, simple; default en")
    command.add_argument(
        "--date", metavar="YYYYMMDD", help="wikipedia: date of the dump; latest is the newest finished one; default latest"
    )
    command.add_argument("--squad-version", choices=tuple(DATASETS["squad"].variants), help="squad: version; default 1.1")
    command.add_argument("--task", nargs="+", choices=tuple(GLUE_FOLDERS), help="glue: tasks; default all")
    text = "amazon: categories, such as Digital_Music; `overnight download amazon --list` lists all"
    command.add_argument("--category", nargs="+", metavar="NAME", help=text)
    command.add_argument("--year", choices=("2014", "2018"), help="amazon: year of the data; default 2014")
    command.add_argument("--ids", nargs="+", type=int, metavar="N", help="gutenberg: numbers of the books; default a short list of novels")
    text = "server or folder that has the files at their host and path, MIRROR/dumps.wikimedia.org/...; default $OVERNIGHT_MIRROR"
    command.add_argument("--mirror", metavar="URL-or-FOLDER", help=text)
    text = "files to download at once; default 2, as many as dumps.wikimedia.org allows"
    command.add_argument("--jobs", type=int, default=2, metavar="N", help=text)
    text = "failures in a row, without a new byte between them, after which a file is given up; default 5"
    command.add_argument("--retries", type=int, default=5, metavar="N", help=text)
    text = "time without a byte after which a connection counts as lost; default 30"
    command.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help=text)
    command.add_argument(
        "--verify",
        action="store_true",
        help="read existing files again and compare their checksums; files that differ are downloaded again",
    )


def _download(options: argparse.Namespace, overrides: list[str]) -> None:
    from overnight.download.selection import Choice, check

    lists = {name: tuple(values) if (values := getattr(options, name)) else None for name in ("task", "category", "ids")}
    choice = Choice(options.language, options.date, options.squad_version, year=options.year, **lists)
    if options.list:
        print(for_stream(_listing(options.dataset, choice), sys.stdout))
        return
    if not options.dataset:
        raise ConfigError(f"name what to get: {', '.join(DATASETS)}; `overnight download --list` says what they are")
    for name, least in (("jobs", 1), ("retries", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} = {getattr(options, name)}: must be {least} or more")
    if not 0 < options.timeout <= 3600:
        raise ConfigError(f"--timeout = {options.timeout:g}: must be above 0 and at most 3600 seconds")
    check(options.dataset, choice)
    import threading

    from overnight.console import Line
    from overnight.download.addresses import mirror_of
    from overnight.download.connection import Source
    from overnight.download.download import Download, said
    from overnight.download.manifest import folder_lock
    from overnight.download.patience import Attempts
    from overnight.download.selection import next_command, select

    setting, text = (
        ("--mirror", options.mirror) if options.mirror is not None else ("OVERNIGHT_MIRROR", os.environ.get("OVERNIGHT_MIRROR", ""))
    )
    folder, stop = _folder(options.to), threading.Event()
    source = Source(mirror_of(text, setting), options.timeout, stop)
    with folder_lock(folder), Line() as line:
        download = Download(folder, source, options.retries, line)
        if source.mirror:
            line.print(f"mirror: {source.mirror.root}")
        selected = select(options.dataset, choice, source, Attempts(options.retries, stop, line.print))
        download.run(selected, options.jobs, options.verify)
        for row in said(selected, folder):
            line.print(row)
    print("next:")
    for one in selected:
        for command in next_command(one, folder):
            print(f"  {command}")


def _folder(to: str | None) -> Path:
    folder = Path(to or os.environ.get("OVERNIGHT_DATA") or "data").expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--to = {folder}: is a file; name a folder")
    return folder


def _listing(names: list[str], choice: Choice) -> str:
    """Return the table of datasets; of some that are named, each of their files, or those that the options ask for."""
    from overnight.console import table
    from overnight.download.selection import check_options, files_to_list

    if wrong := [name for name in names if name not in DATASETS]:
        raise ConfigError(f"{wrong[0]!r}: is not one of {', '.join(DATASETS)}")
    check_options(names, choice)
    blocks = []
    for name in names or DATASETS:
        row = DATASETS[name]
        files = files_to_list(row, choice)
        lines = [f"{name}: {row.summary}", f"  files: {_counted(files)}"]
        if names:
            shown = [("file", "bytes", "checksum", "address"), *(_cells(file) for file in files)]
            lines += [f"  {line}" for line in (table(shown, left=4).splitlines() if files else [])]
        blocks.append("\n".join([*lines, f"  license: {row.license}", f"  cite: {row.citation}"]))
    more = "" if names else "\n\n`overnight download NAME --list` lists the files of one, with addresses, sizes and checksums."
    return "\n\n".join(blocks) + more


def _counted(files: list[RemoteFile]) -> str:
    from urllib.parse import urlsplit

    from overnight.display import plural
    from overnight.download.jobs import megabytes
    from overnight.download.wikipedia import wanted_files

    if not files:
        return f"two of each language and date, with their checksums; of simple: {wanted_files('simplewiki')}"
    hosts = ", ".join(sorted({urlsplit(file.address).netloc for file in files}))
    sizes, sums = [file.size for file in files if file.size], sum(bool(file.checksum) for file in files)
    known = f"{megabytes(sum(sizes))} in all" if len(sizes) == len(files) else "sizes not published"
    return f"{plural(len(files), 'file')} at {hosts}, {known}, {'all with' if sums == len(files) else 'without'} published checksums"


def _cells(file: RemoteFile) -> tuple[str, str, str, str]:
    return f"{file.path}{'/' if file.unpack else ''}", f"{file.size:,}" if file.size else "-", file.checksum or "-", file.address
