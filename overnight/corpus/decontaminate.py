"""Evaluation text in the training documents, found by its word n-grams (13 words, as in Brown et al. 2020, arXiv 2005.14165, appendix C)."""

from __future__ import annotations

import csv
import fnmatch
import io
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from overnight.corpus import data_paths, decompress, shingles, zips
from overnight.corpus.csv_cells import next_cells
from overnight.corpus.decompress import TruncatedError
from overnight.corpus.document import OpenFile
from overnight.corpus.shards import checked_chunk, is_sealed, read_table, seal_chunk
from overnight.corpus.words import text_and_offsets
from overnight.corpus.workers import Workers, run_tasks
from overnight.errors import DataError
from overnight.run_dir.atomic import write_whole
from overnight.state_files import parse_json

Item = TypeVar("Item")
# Texts whose n-grams are hashed at once, characters; and of a JSON file, which is read whole.
_BATCH, _MAX_JSON = 8 << 20, 1 << 30
# Accents that are characters of their own, and the parts of Korean syllables.
_COMBINING = r"[\p{M}\x{1100}-\x{11FF}]"


def evaluation_texts(path: str, key: str = "data.decontaminate") -> Iterator[str]:
    """Yield the texts of a path, with compression undone and archives walked.

    Of `.json` (one value, or one a line) and `.jsonl` every string is a text, of `.tsv` and `.csv` every cell, of other files every paragraph. So labels and names
    are texts too, but they have too few words to matter.

    Args:
        path: a file, a folder, a glob or an archive.
        key: what a message names as its origin.

    Raises:
        DataError: when there is no such file, or it is cut, not UTF-8 or not of its format.
    """
    for file in data_paths.expand(path, key):
        with open(file, "rb") as raw:
            yield from _texts_of_file(raw, str(file), data_paths.pattern(path), key)


def _texts_of_file(raw: IO[bytes], name: str, pattern: str, key: str, allowed: zips.Allowance | None = None) -> Iterator[str]:
    """Yield the texts of a file, or of the members of an archive that match; `allowed` is what the zip archive around it may still unpack to."""
    again = f"get it again, or correct {key}"

    def texts_of_members(members: Iterator[tuple[str, io.BufferedReader]]) -> Iterator[str]:
        for member, content in members:
            if not pattern or fnmatch.fnmatchcase(member, pattern):
                yield from _texts_of_file(content, f"{name}:{member}", "", key, allowed)

    try:
        stream, inner = decompress.unpacked(raw, name)
        if decompress.is_tar(stream, inner):
            yield from texts_of_members(decompress.members(stream, name))
            return
        if zips.is_zip(stream, inner):
            with decompress.seekable(stream, name) as found:
                allowed = allowed or zips.allowance(found, name)
                yield from texts_of_members(zips.members(found, name, allowed))
            return
        lines = io.TextIOWrapper(cast(IO[bytes], stream), "utf-8-sig", newline="")
        kind = Path(inner).suffix.lower()
        yield from _READERS.get(kind, _paragraphs)(lines)
        lines.detach()
    except TruncatedError as error:
        raise DataError(f"{error}; {again}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: is not UTF-8 ({error.reason}); convert it, or correct {key}") from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"{name}: {error}; {again}") from None


def _json(lines: io.TextIOWrapper) -> Iterator[str]:
    """Yield the strings of one value, or of one a line, as files of that name are read where they are text to train on."""
    text = ""
    while not text.strip() and (line := lines.readline(_MAX_JSON + 1)):
        text += line
    try:
        first = parse_json(text)
    except ValueError:
        text += lines.read(max(_MAX_JSON + 1 - len(text), 0))
        if len(text) > _MAX_JSON:
            raise ValueError(f"has more than {_MAX_JSON >> 20} MB in one JSON value; make JSON lines of it") from None
        yield from _strings(parse_json(text))
        return
    # A first line that is a value is all there is, or the first of several.
    yield from _strings(first)
    yield from _json_lines(lines)


def _json_lines(lines: io.TextIOWrapper) -> Iterator[str]:
    for line in lines:
        if line.strip():
            yield from _strings(parse_json(line))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _csv(lines: io.TextIOWrapper) -> Iterator[str]:
    reader = csv.reader(lines)
    while (row := next_cells(reader, OpenFile.max_bytes)) is not None:
        yield from row


def _paragraphs(lines: io.TextIOWrapper) -> Iterator[str]:
    block: list[str] = []
    for line in lines:
        if line.strip():
            block.append(line)
        elif block:
            yield "".join(block)
            block = []
    yield "".join(block)


_READERS: dict[str, Callable[[io.TextIOWrapper], Iterator[str]]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".tsv": lambda lines: (cell for line in lines for cell in line.split("\t")),
    ".csv": _csv,
}


def write_ngrams(paths: list[str], n: int, out: Path, log: Callable[[str], None], forms: Sequence[Callable[[str], str]]) -> None:
    """Write the hashes of all n-grams of evaluation texts in several forms, sorted, each once: uint64; do nothing where that is done.

    Args:
        paths: `data.decontaminate`.
        n: words of an n-gram.
        out: the file.
        log: called with what was found.
        forms: each returns one, such as a text that is cleaned: in training text entities, accents and markup may stand otherwise than in an evaluation.

    Raises:
        DataError: see :func:`evaluation_texts`; or no text of a path has so many words.
    """
    if is_sealed(out):
        return
    found = [np.zeros(0, np.uint64)]
    for path in paths:
        hashes, long, short = _ngrams_of(path, n, forms)
        if not long:
            raise DataError(f"data.decontaminate: no text of {path} has {n} words; lower data.decontaminate_words or leave it out")
        log(f"decontaminate: {path}: {len(hashes):,} {n}-grams of {long:,} texts; {short:,} have fewer words and are not looked for")
        found.append(hashes)
    write_whole(out, [np.unique(np.concatenate(found)).data.cast("B")])
    seal_chunk(out)


def _ngrams_of(path: str, n: int, forms: Sequence[Callable[[str], str]]) -> tuple[np.ndarray, int, int]:
    """Return the n-grams of a path, how many texts have one, and how many not."""
    found, long, count = [np.zeros(0, np.uint64)], 0, 0
    for texts in in_batches(evaluation_texts(path), len):
        has_some = np.zeros(len(texts), bool)
        for form in forms:
            hashes, ends = ngrams([form(text) for text in texts], n)
            has_some |= np.diff(ends, prepend=0) > 0
            found.append(np.unique(hashes))
        long, count = long + int(np.count_nonzero(has_some)), count + len(texts)
    return np.unique(np.concatenate(found)), long, count - long


def in_batches(items: Iterable[Item], characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield texts, or what stands for one, so many at once that they can be hashed together."""
    found, size = [], 0
    for item in items:
        found.append(item)
        size += characters(item)
        if size > _BATCH:
            yield found
            found, size = [], 0
    if found:
        yield found


def ngrams(texts: Sequence[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the n-grams of texts, as :func:`composed_ngrams`."""
    return composed_ngrams(pa.array([text.encode("utf-8", "replace") for text in texts], pa.large_binary()), n)


def composed_ngrams(texts: pa.Array, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the n-grams of texts, as :func:`shingles.ngram_hashes`; a letter with an accent is the same in one character and in two, as byte models keep it.

    Args:
        texts: [D], large strings or large binary in UTF-8.
        n: words of an n-gram.
    """
    composed = texts.cast(pa.large_string())
    # To compose takes several times as long as to see that there is nothing to compose.
    if pc.any(pc.match_substring_regex(composed, _COMBINING)).as_py():
        # Not by `pc.utf8_normalize`, which leaves letters in two characters as they are before pyarrow 26.
        composed = pa.array([unicodedata.normalize("NFC", text) for text in composed.to_pylist()], pa.large_string())
    return shingles.ngram_hashes(*text_and_offsets(composed), n)


@dataclass(frozen=True)
class MarkTask:
    """A clean chunk, and the n-grams to look for in it."""

    clean: Path
    ngrams: Path
    n: int


def _marks_path(clean: Path) -> Path:
    return clean.with_name(clean.name.replace("clean", "evaluation")).with_suffix(".u8")


def mark_chunk(task: MarkTask) -> None:
    """Write which documents of a chunk contain an n-gram of evaluation text: uint8 [D], 1 for those."""
    if is_sealed(path := _marks_path(task.clean)):
        return
    hashes, ends = composed_ngrams(read_table(checked_chunk(task.clean)).column("text"), task.n)
    at, _ = _table(task.ngrams, task.ngrams.stat().st_mtime_ns).find(hashes)
    marks = np.zeros(len(ends), np.uint8)
    marks[np.searchsorted(ends, at, "right")] = 1
    write_whole(path, [marks.data] if len(marks) else [])
    seal_chunk(path)


class Lookup:
    """Which n-grams are wanted; most others are told apart at once, by the first bits of their hash.

    Args:
        wanted: uint64 [W], sorted, each once.
    """

    def __init__(self, wanted: np.ndarray) -> None:
        self.wanted, self._shift = wanted, np.uint64(64 - max(16, len(wanted).bit_length() + 3))
        self._likely = np.zeros(1 << (64 - int(self._shift)), bool)
        self._likely[wanted >> self._shift] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where wanted ones stand among hashes (uint64 [H]), and which of the wanted each is: int64 [F], int64 [F]."""
        at = np.flatnonzero(self._likely[hashes >> self._shift])
        places = np.minimum(np.searchsorted(self.wanted, hashes[at]), len(self.wanted) - 1)
        same = self.wanted[places] == hashes[at]
        return at[same], places[same]


@lru_cache(1)
def _table(path: Path, changed: int) -> Lookup:
    """Return the n-grams of a file, kept until it has changed."""
    return Lookup(np.fromfile(checked_chunk(path), np.uint64))


def find_evaluation_text(chunks: list[Path], ngrams: Path, n: int, workers: Workers) -> np.ndarray:
    """Return which documents of all chunks contain an n-gram that :func:`write_ngrams` wrote: bool [D]."""
    for _ in run_tasks(mark_chunk, (MarkTask(path, ngrams, n) for path in chunks), workers):
        pass
    return np.concatenate([np.fromfile(checked_chunk(_marks_path(path)), np.uint8) for path in chunks]).astype(bool)
