"""Minimal pairs of BLiMP (Warstadt et al. 2020, arXiv 1912.00582): reading them, and what the preferences of a model add up to."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from overnight.corpus import decompress
from overnight.corpus.data_paths import every_file
from overnight.corpus.decompress import TruncatedError
from overnight.errors import DataError, first_names
from overnight.state_files import STRICT, digest, is_text, parse_json
from overnight.tasks.rows import NO_TEXT

_KEYS = ("sentence_good", "sentence_bad", "field", "linguistics_term")
_LONGEST_LINE = 1 << 20
_HOW = "name blimp.tar.xz, or a folder with its data/*.jsonl"


class Pair(NamedTuple):
    """A sentence that speakers accept, and one that they do not."""

    good: str
    bad: str
    where: str
    """File and line."""


@dataclass(frozen=True)
class Paradigm:
    """The pairs of one file, all made from one template."""

    name: str
    field: str
    """Of linguistics, such as `morphology`."""
    term: str
    """The phenomenon, such as `island_effects`: a group of paradigms."""
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class ParadigmScore:
    """How often a model prefers the good sentence of a paradigm's pairs."""

    __pydantic_config__ = STRICT
    name: str
    field: str
    term: str
    pairs: int
    wins: int
    """Pairs whose good sentence is the likelier."""
    ties: int
    """Pairs whose sentences are as likely; each counts half."""
    indistinguishable: int
    """Of the ties, those whose sentences are the same tokens, mostly because a word of each is [UNK]."""

    @property
    def accuracy(self) -> float:
        """Share of good sentences that are preferred (0 to 1), ties counted half."""
        return (self.wins + self.ties / 2) / self.pairs

    @property
    def variance(self) -> float:
        """Variance of the accuracy, were the pairs drawn anew from their template; unknown (NaN) of a single pair."""
        if self.pairs < 2:
            return math.nan
        squares = self.wins + self.ties / 4 - self.pairs * self.accuracy**2
        return squares / (self.pairs - 1) / self.pairs


class Mean(NamedTuple):
    """A mean over paradigms, each with the same weight."""

    accuracy: float
    standard_error: float
    """Of pairs drawn anew from the same templates; NaN where a paradigm has a single pair."""


def mean(scores: Sequence[ParadigmScore]) -> Mean:
    """Return the mean accuracy of paradigms, and its standard error."""
    return Mean(statistics.fmean(s.accuracy for s in scores), math.sqrt(sum(s.variance for s in scores)) / len(scores))


def grouped(scores: Sequence[ParadigmScore], by: str) -> dict[str, Mean]:
    """Return the means of groups of paradigms, by `term` or `field`, in alphabetical order."""
    groups: dict[str, list[ParadigmScore]] = {}
    for score in scores:
        groups.setdefault(getattr(score, by), []).append(score)
    return {name: mean(groups[name]) for name in sorted(groups)}


def read_blimp(path: Path) -> list[Paradigm]:
    """Return the paradigms of an archive, of a folder (`*.jsonl`, or those in its `data`) or of a single file, by name.

    An archive is read as a stream and never unpacked to the disk.

    Raises:
        DataError: the path is missing, cut short or damaged, or a line is no pair; with the file and the line.
    """
    found: dict[str, Paradigm] = {}
    try:
        for name, content in _chosen(_files(path)).items():
            paradigm = _paradigm(PurePosixPath(name.rpartition(":")[2]).stem, name, content)
            if paradigm.name in found:
                raise DataError(f"{name}: the paradigm {paradigm.name!r} is there twice; {_HOW}")
            found[paradigm.name] = paradigm
    except TruncatedError as error:
        raise DataError(f"{path}: is cut short ({error}); get it again") from None
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read ({error.strerror}); {_HOW}") from None
    if not found:
        raise DataError(f"{path}: holds no .jsonl file; {_HOW}")
    return [found[name] for name in sorted(found)]


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each .jsonl file."""
    if path.is_dir():
        for file in sorted(file for file in every_file(path) if file.name.endswith(".jsonl")):
            yield str(file), file.read_bytes()
        return
    if not path.exists():
        raise DataError(f"{path}: does not exist; {_HOW}")
    with open(path, "rb") as raw:
        stream, inner = decompress.unpacked(raw, str(path))
        if not decompress.is_tar(stream, inner):
            yield str(path), stream.read()
            return
        for member, content in decompress.members(stream, str(path)):
            if member.endswith(".jsonl"):
                yield f"{path}:{member}", content.read()


def _chosen(files: Iterator[tuple[str, bytes]]) -> dict[str, bytes]:
    """Return the files in a folder called `data`, if there are any: what else was published beside them is no pairs."""
    every = dict(files)
    return {name: content for name, content in every.items() if PurePosixPath(name.rpartition(":")[2]).parent.name == "data"} or every


def _paradigm(name: str, place: str, content: bytes) -> Paradigm:
    pairs: list[Pair] = []
    kind: tuple[str, str] | None = None
    for number, line in enumerate(io.BytesIO(content), 1):
        where = f"{place}:{number}"
        if len(line) > _LONGEST_LINE:
            raise DataError(f"{where}: has {len(line):,} bytes, which no pair of sentences has; {_HOW}")
        if not line.strip():
            continue
        row = _row(line, where)
        # Published with both spellings of one field, `syntax/semantics` and `syntax_semantics`.
        kind = kind or (row["field"].replace("/", "_"), row["linguistics_term"])
        pairs.append(Pair(row["sentence_good"], row["sentence_bad"], where))
    if kind is None:
        raise DataError(f"{place}: is empty; get it again, or leave it out")
    return Paradigm(name, *kind, tuple(pairs))


def _row(line: bytes, where: str) -> Mapping[str, str]:
    try:
        row = parse_json(line.decode())
    except ValueError as error:  # UnicodeDecodeError is one too
        raise DataError(f"{where}: is not JSON ({error}); the file is damaged or cut short: get it again") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: is not a JSON object; each line is a pair of sentences")
    for key in _KEYS:
        if not isinstance(row.get(key), str):
            raise DataError(f"{where}: has no text under {key!r}; its keys are: {first_names(list(row))}")
        if not row[key].strip():
            raise DataError(f"{where}: {key!r} is empty; correct it, or leave the line out")
        if not is_text(row[key]):
            raise DataError(f"{where}: {key!r} {NO_TEXT}, or leave the line out")
    return row


def chosen_pairs(paradigm: Paradigm, count: int) -> tuple[Pair, ...]:
    """Return `count` pairs of a paradigm, drawn by the hash of their sentences, in the order of the file; all where it has no more, or for 0."""
    if not 0 < count < len(paradigm.pairs):
        return paradigm.pairs
    by_hash = sorted(range(len(paradigm.pairs)), key=lambda i: (digest("\n".join(paradigm.pairs[i][:2]).encode()), i))
    return tuple(paradigm.pairs[i] for i in sorted(by_hash[:count]))


def digest_of_pairs(paradigms: Sequence[Paradigm]) -> str:
    """Return a hash of all sentences, 16 hex digits: other pairs are another evaluation."""
    return digest("\n".join("\t".join((p.name, pair.good, pair.bad)) for p in paradigms for pair in p.pairs).encode())
