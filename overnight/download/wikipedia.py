"""Dumps of Wikipedia: which there are, and the files of one with their sizes and checksums, as dumps.wikimedia.org lays them out."""

from __future__ import annotations

import re
from typing import Any

from overnight.download.addresses import shown
from overnight.download.connection import MissingError, Source
from overnight.download.datasets import RemoteFile
from overnight.download.patience import Attempts
from overnight.errors import ConfigError, DataError
from overnight.state_files import parse_json

_HOME = "https://dumps.wikimedia.org"
_MOST_STATUS = 64 << 20
# A dump takes days to make, so that the newest may be unfinished; one of these is whole.
_NEWEST = 6
_JOBS = ("articlesmultistreamdumprecombine", "articlesmultistreamdump")
"""What makes the file of all articles: of large Wikipedias the first joins the parts that the second makes."""


def wikipedia_files(language: str, date: str, source: Source, attempts: Attempts) -> list[RemoteFile]:
    """Return the dump of all articles in many bzip2 streams, and the index of these.

    Args:
        language: of the Wikipedia: en, de, simple.
        date: of the dump, YYYYMMDD, or `latest` for the newest that is finished.
        source: where from.
        attempts: how often to try.

    Raises:
        ConfigError: the language or the date is written wrongly.
        DataError: there is no such Wikipedia, no such dump, or it is not finished.
    """
    if not re.fullmatch(r"[a-z][a-z-]{1,30}", language):
        raise ConfigError(f"--language = {language!r}: must be as in the address of that Wikipedia: en, de, zh-yue, simple")
    if date != "latest" and not re.fullmatch(r"\d{8}", date):
        raise ConfigError(f"--date = {date!r}: must be YYYYMMDD, such as 20261101, or latest")
    wiki = f"{language.replace('-', '_')}wiki"
    if date != "latest":
        files = _files_of(wiki, date, source, attempts)
        if isinstance(files, str):
            raise DataError(f"{files}; https://dumps.wikimedia.org/{wiki}/ lists others, --date=latest takes the newest that is finished")
        return files
    try:
        names = source.names(f"{_HOME}/{wiki}/", attempts)
    except MissingError as error:
        raise DataError(f"{error}; is there a Wikipedia in --language={language}?") from None
    # In a mirror that has the files side by side, their names have the date.
    found = [re.fullmatch(rf"(?:{wiki}-)?(\d{{8}})(?:-.*)?", name) for name in names]
    dates = sorted({match[1] for match in found if match}, reverse=True)
    if not dates and source.mirror and source.mirror.is_folder:
        raise DataError(f"{source.mirror.root}: has no dump of {wiki}; it needs {wanted_files(wiki)}")
    problem = f"{source.where(f'{_HOME}/{wiki}/')}: lists no dumps"
    for newest in dates[:_NEWEST]:
        files = _files_of(wiki, newest, source, attempts)
        if not isinstance(files, str):
            return files
        problem = files
    raise DataError(f"{problem}; name one by --date=YYYYMMDD")


def wanted_files(wiki: str) -> str:
    """Return what a mirror needs of a dump, as people say it."""
    stem = f"{wiki}-DATE-pages-articles-multistream"
    return f"{stem}.xml.bz2, {stem}-index.txt.bz2 and {wiki}-DATE-sha1sums.txt of {_HOME}/{wiki}/DATE/"


def _files_of(wiki: str, date: str, source: Source, attempts: Attempts) -> list[RemoteFile] | str:
    """Return the files of a dump, or why they cannot be had."""
    base, stem = f"{_HOME}/{wiki}/{date}", f"{wiki}-{date}-pages-articles-multistream"
    wanted = {f"{stem}.xml.bz2": "wikipedia", f"{stem}-index.txt.bz2": "wikipedia-index"}
    try:
        known = _dump_status(source.read(f"{base}/dumpstatus.json", _MOST_STATUS, attempts), f"{base}/dumpstatus.json")
    except MissingError:
        try:  # mirrors may keep only the files and their checksums
            known = _sums(source.read(f"{base}/{wiki}-{date}-sha1sums.txt", _MOST_STATUS, attempts).decode("utf-8", "replace"))
        except MissingError as error:
            return str(error)
    absent = [name for name in wanted if name not in known]
    if absent:
        return f"{shown(base)}: has no finished {absent[0]}"
    return [RemoteFile(f"{base}/{name}", f"{folder}/{name}", *known[name]) for name, folder in wanted.items()]


def _dump_status(content: bytes, where: str) -> dict[str, tuple[int | None, str]]:
    """Return size and checksum of the files of finished jobs."""
    try:
        tree: Any = parse_json(content.decode())
        jobs = {name: tree["jobs"][name] for name in _JOBS if name in tree["jobs"]}
        done = [job for job in jobs.values() if job["status"] == "done"]
        found = [(name, file) for job in done for name, file in job.get("files", {}).items()]
        return {str(name): (int(file["size"]), f"sha1:{_sha1(file['sha1'])}") for name, file in found if "sha1" in file and "size" in file}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{where}: is not the status of a dump ({type(error).__name__}: {error})") from None


def _sums(text: str) -> dict[str, tuple[int | None, str]]:
    """Return the checksums of a file with one `digits  name` a line; sizes are not in it."""
    found = re.findall(r"^([0-9a-f]{40}) [ *](\S+)$", text, re.MULTILINE)
    return {name: (None, f"sha1:{digits}") for digits, name in found}


def _sha1(digits: Any) -> str:
    if not re.fullmatch("[0-9a-f]{40}", digits):
        raise ValueError(f"{digits!r:.50} is no SHA-1")
    return str(digits)
