"""What differs between two prepared folders: settings, counts, vocabularies, and documents, found again by a hash of their text.

Pairs of hash and document are sorted on the disk (:mod:`external_sort`), so memory holds a byte a document and one range of the hashes.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from overnight.corpus import external_sort
from overnight.corpus.prepared import Prepared
from overnight.corpus.settings import different_settings
from overnight.corpus.shards import SPLITS, Manifest, ShardEntry, checked_chunk

# Records of a run, and of a range of hashes that is compared at once (16 bytes each).
_RUN, _RANGE = 1 << 20, 1 << 22
# A document is one number: its split in the upper bits, its number in it in the others.
_SPLIT = np.uint64(60)
Place = tuple[str, int]
"""A split, and a number in it, from 1."""
Row = tuple[str, Any, Any]
"""What it is, and its value in the first and in the second folder."""


def setting_rows(a: Manifest, b: Manifest) -> list[Row]:
    """Return the settings that differ, and the version of the rules of cleaning; None stands for paths that were never read."""

    def read(manifest: Manifest, name: str, value: Any) -> Any:
        return None if name == "data.paths" and manifest.settings.get("sources") else value

    settings = [(name, read(a, name, one), read(b, name, two)) for name, one, two in different_settings(a.settings, b.settings)]
    return [*settings, *_differing([("version of the cleaning rules", a.cleaning, b.cleaning)])]


def count_rows(a: Manifest, b: Manifest) -> list[Row]:
    """Return the counts of the manifests that differ."""
    rows: list[Row] = [
        (f"{split} {what}", a.count(split, what), b.count(split, what)) for split in SPLITS for what in ("documents", "sentences", "tokens")
    ]
    one, two = (_named_counts(each) for each in (a, b))
    return _differing(rows + [(name, one[name], two[name]) for name in {**one, **two}])


def _named_counts(manifest: Manifest) -> Counter[str]:
    """Return what was dropped, masked and read, by what it is called."""
    dropped = {"duplicates": manifest.duplicates, "min_chars": manifest.short} | manifest.dropped
    found = Counter({f"dropped by {name}": count for name, count in dropped.items()})
    found.update({f"masked: {name}": count for name, count in manifest.masked.items()})
    for source in manifest.sources:  # several may read one path, and one may read several
        found[f"documents read of {source.title}"] += source.documents
        found[f"bytes read of {source.title}"] += source.bytes
    return found


def _differing(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row[1] != row[2]]


@dataclass(frozen=True)
class VocabularyChange:
    """What differs between two vocabularies."""

    lost: list[str]
    """Tokens that only the first has, in its order."""
    gained: list[str]
    """Tokens that only the second has, in its order."""
    renumbered: int
    """Tokens of both that have another id."""


def compare_vocabularies(a: Prepared, b: Prepared) -> VocabularyChange:
    """Compare the tokens of two folders."""
    one, two = ({token: number for number, token in enumerate(each.decoder.tokens)} for each in (a, b))
    return VocabularyChange(
        [token for token in one if token not in two],
        [token for token in two if token not in one],
        sum(one[token] != number for token, number in two.items() if token in one),
    )


@dataclass
class DocumentChange:
    """Which documents of two folders are the same."""

    by: str
    """What tells that two are, in words."""
    same: int = 0
    moved: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of the same ones those that are in another split: from which to which."""
    other_source: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Of the same ones those that are of another named source: from which to which."""
    changed: int = 0
    """Of the others those whose name both folders have."""
    only_a: int = 0
    only_b: int = 0
    samples: dict[str, list[Any]] = field(default_factory=lambda: {"moved": [], "changed": [], "only_a": [], "only_b": []})
    """Of each kind the first: places, or pairs of them (in the first folder, in the second)."""


def compare_documents(a: Prepared, b: Prepared, samples: int) -> DocumentChange:
    """Find the documents of each folder in the other.

    Args:
        samples: of each kind, the first in the order of the documents.
    """
    keys, by = _keys_for(a, b)
    found = DocumentChange(by)
    with tempfile.TemporaryDirectory(prefix="overnight-diff-") as name:
        work = Path(name)
        # The seals of runs are read beside them.
        left = [_flags(each) for each in (a, b)]
        runs = [_sorted(_records(each, keys, None), work, letter) for each, letter in ((a, "a"), (b, "b"))]
        for one, two in _matches(*runs):
            found.same += len(one)
            for each, codes in zip(left, (one, two), strict=True):
                _unflag(each, codes)
            _count_moved(found, one, two, samples)
            _count_other_source(found, _source_names(a, one), _source_names(b, two))
        if a.table and b.table:
            runs = [
                _sorted(_records(each, _name_keys, flags), work, letter) for each, flags, letter in ((a, left[0], "c"), (b, left[1], "d"))
            ]
            for one, two in _matches(*runs):
                found.changed += len(one)
                for each, codes in zip(left, (one, two), strict=True):
                    _unflag(each, codes)
                _keep(found.samples["changed"], one, two, samples)
    for name, each in (("only_a", left[0]), ("only_b", left[1])):
        setattr(found, name, sum(int(flags.sum()) for flags in each.values()))
        places = ((split, int(row) + 1) for split, flags in each.items() for row in np.flatnonzero(flags)[:samples])
        found.samples[name] = list(places)[:samples]
    return found


Keys = Callable[[Prepared, ShardEntry], np.ndarray]


def _keys_for(a: Prepared, b: Prepared) -> tuple[Keys, str]:
    """Return what gives uint64 [D] of the documents of a shard, equal for equal ones, and its name."""
    if a.table and b.table:
        return lambda each, entry: _rows(each, entry).hashes, "the hash of the clean text"
    if a.manifest.tokenizer == b.manifest.tokenizer:
        return _token_keys, "their tokens"
    return _text_keys, "their decoded text without white space"


def _rows(prepared: Prepared, entry: ShardEntry) -> Any:
    assert prepared.table is not None
    return prepared.table.rows(entry)


def _name_keys(prepared: Prepared, entry: ShardEntry) -> np.ndarray:
    return np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in _rows(prepared, entry).names.to_pylist()], np.uint64)


def _token_keys(prepared: Prepared, entry: ShardEntry) -> np.ndarray:
    shard, _ = prepared.open(entry)
    bounds = shard.sentence_starts[shard.document_sentences].tolist()
    return np.array([xxhash.xxh3_64_intdigest(shard.tokens[start:end].data) for start, end in pairwise(bounds)], np.uint64)


def _text_keys(prepared: Prepared, entry: ShardEntry) -> np.ndarray:
    shard, _ = prepared.open(entry)
    bounds = shard.sentence_starts[shard.document_sentences].tolist()
    texts = (prepared.decoder.text(shard.tokens[start:end]) for start, end in pairwise(bounds))
    return np.array([xxhash.xxh3_64_intdigest("".join(text.lower().split()).encode()) for text in texts], np.uint64)


def _records(prepared: Prepared, keys: Keys, flags: dict[str, np.ndarray] | None) -> Iterator[np.ndarray]:
    """Yield records of key and document, uint64 [N, 2], shard by shard; of the flagged documents only, where there are flags."""
    for kind, split in enumerate(SPLITS):
        first = 1
        for entry in prepared.entries(split):
            codes = (np.uint64(kind) << _SPLIT) + np.arange(first, first + entry.documents, dtype=np.uint64)
            take = slice(None) if flags is None else flags[split][first - 1 : first - 1 + entry.documents]
            if flags is None or take.any():  # type: ignore[union-attr]
                yield np.stack([keys(prepared, entry), codes], axis=1)[take]
            first += entry.documents


def _sorted(records: Iterator[np.ndarray], work: Path, name: str) -> list[Path]:
    """Return sorted runs of all records, few enough to be merged at once."""
    runs: list[Path] = []
    waiting: list[np.ndarray] = []

    def write() -> None:
        together = np.concatenate(waiting)
        for start in range(0, len(together), _RUN):
            runs.append(work / f"{name}-{len(runs):05d}.run")
            external_sort.write_run(runs[-1], together[start : start + _RUN])
        waiting.clear()

    for part in records:
        waiting.append(part)
        if sum(map(len, waiting)) >= _RUN:
            write()
    if waiting:
        write()
    return [checked_chunk(run) for run in external_sort.few_runs(runs, work, name, workers=1)]


def _matches(a: Sequence[Path], b: Sequence[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the documents of A and of B that have the same key, uint64 [N] each; of several with one key the first with the first, and so on."""
    count = max(1, -(-sum(external_sort.length(run) for run in [*a, *b]) // _RANGE))
    for low, high in pairwise([(number << 64) // count for number in range(count + 1)]):
        one, two = (np.concatenate([np.zeros((0, 2), np.uint64), *external_sort.merged(runs, low, high)]) for runs in (a, b))
        keys = np.ascontiguousarray(two[:, 0])
        # How many of the same key are before it.
        before = np.arange(len(one)) - np.searchsorted(np.ascontiguousarray(one[:, 0]), one[:, 0])
        place = np.searchsorted(keys, one[:, 0]) + before
        inside = place < len(two)
        inside[inside] = keys[place[inside]] == one[inside, 0]
        yield one[inside, 1], two[place[inside], 1]


def _flags(prepared: Prepared) -> dict[str, np.ndarray]:
    return {split: np.ones(prepared.manifest.count(split, "documents"), bool) for split in SPLITS}


def _kinds_and_rows(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the split of each document and its number there, from 0."""
    return codes >> _SPLIT, (codes & ((np.uint64(1) << _SPLIT) - np.uint64(1))).astype(np.int64) - 1


def _unflag(flags: dict[str, np.ndarray], codes: np.ndarray) -> None:
    kinds, rows = _kinds_and_rows(codes)
    for kind, split in enumerate(SPLITS):
        flags[split][rows[kinds == kind]] = False


def _count_moved(found: DocumentChange, one: np.ndarray, two: np.ndarray, samples: int) -> None:
    moved = (one >> _SPLIT) != (two >> _SPLIT)
    kinds, counts = np.unique(np.stack([one[moved] >> _SPLIT, two[moved] >> _SPLIT], axis=1), axis=0, return_counts=True)
    for (before, after), count in zip(kinds.tolist(), counts.tolist(), strict=True):
        found.moved[SPLITS[before], SPLITS[after]] += count
    _keep(found.samples["moved"], one[moved], two[moved], samples)


def _source_names(prepared: Prepared, codes: np.ndarray) -> np.ndarray:
    """Return the names of the sources of documents, str [N]: those of the shards they are in."""
    kinds, rows = _kinds_and_rows(codes)
    names = np.full(len(codes), "", object)
    for kind, split in enumerate(SPLITS):
        if entries := prepared.entries(split):
            here = kinds == kind
            shard = np.searchsorted(np.cumsum([entry.documents for entry in entries]), rows[here], side="right")
            names[here] = np.array([entry.source for entry in entries], object)[shard]
    return names


def _count_other_source(found: DocumentChange, before: np.ndarray, after: np.ndarray) -> None:
    other = before != after
    found.other_source.update(zip(before[other].tolist(), after[other].tolist(), strict=True))


def _keep(samples: list[Any], one: np.ndarray, two: np.ndarray, most: int) -> None:
    """Keep the first pairs in the order of the documents of the first folder."""
    first = np.argsort(one)[:most]
    coded = [(_code(x), _code(y)) for x, y in samples] + list(zip(one[first].tolist(), two[first].tolist(), strict=True))
    samples[:] = [(_place(x), _place(y)) for x, y in sorted(coded)[:most]]


def _code(place: Place) -> int:
    return (SPLITS.index(place[0]) << int(_SPLIT)) + place[1]


def _place(code: int) -> Place:
    return SPLITS[code >> int(_SPLIT)], code & ((1 << int(_SPLIT)) - 1)


# Words that are shown before the first difference of two texts, and of each of its sides at most.
_AROUND, _MOST = 8, 20


def first_difference(a: str, b: str) -> tuple[str, str, str]:
    """Return where two texts begin to differ: the words before, and those of each up to where they agree again."""
    one, two = a.split(), b.split()
    same = next((number for number, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
    # The next words are compared among each other; all words of two books would take minutes.
    left, right = one[same : same + 10 * _MOST], two[same : same + 10 * _MOST]
    steps = SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    _, i, j, k, m = next((step for step in steps if step[0] != "equal"), ("", 0, 0, 0, 0))
    first = same + i
    return " ".join(one[max(0, first - _AROUND) : first]), " ".join(left[i:j][:_MOST]), " ".join(right[k:m][:_MOST])
