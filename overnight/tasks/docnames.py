"""Does this name belong to this docstring? A labeled task made from the documentation inside the Python environment.

Segment A is a qualified name split into words, segment B a docstring; a wrong name is another's of the same package.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from overnight.errors import DataError
from overnight.tasks.examples import Example, TaskData

if TYPE_CHECKING:
    from overnight.corpus.pydocs import Docstring

LABELS = ("other", "own")
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
# 128 tokens of a small vocabulary are about 400 characters; what lies beyond 1,000 is never read.
_CHARS = 1000
_MIN_CHARS = 40
# Families of methods share their opening and differ in one name further down; one of each is kept.
_SAME_OPENING = 200
_MIN_ROWS = 40

_Entry = tuple[str, str]
"""Name in words, and text."""
_Pair = tuple[_Entry, _Entry]


def load_docnames(docstrings: Iterable[Docstring] | None = None, seed: int = 0, train: int = 48000, dev: int = 1000) -> TaskData:
    """Make the task: half of the rows have the docstring's own name, half that of another docstring of the same package.

    Two docstrings of a package make a row to score, in which one gives the text and one the wrong name. To train on they make all four
    rows, each text once with each name: a network that remembers texts or names, and what their label was, gains nothing by it. So
    neither tells the label without the other, and no docstring is on both sides of the split.

    Args:
        docstrings: from where; None is the documentation inside this environment.
        seed: another seed makes other rows.
        train, dev: rows, those to train on in fours; where there are too few docstrings, first there are fewer to train on, then to
            score, and the notes say so.

    Raises:
        DataError: too few docstrings.
    """
    if docstrings is None:
        from overnight.corpus.pydocs import docstrings as installed

        docstrings = installed()
    pairs = sorted(_pairs(docstrings, seed), key=lambda pair: _rank(seed, "row", pair[0][1]))
    notes: tuple[str, ...] = ()
    if len(pairs) < train // 4 + dev:
        wanted = f"{train:,} and {dev:,}"
        dev = min(dev, len(pairs) // 5)
        train = 4 * (len(pairs) - dev)
        notes = (f"{train:,} training and {dev:,} scored rows instead of {wanted}: there are no more docstrings",)
    if min(train // 4, dev) < _MIN_ROWS // 2:
        raise DataError(
            f"the documentation of this environment gives {len(pairs)} name-docstring pairs, too few for the task; install more packages"
        )
    scored = [_example(index, pair[0], pair[index % 2 == 0]) for index, pair in enumerate(pairs[:dev])]
    trained = [_example(index, described, named) for index, (described, named) in enumerate(_all_four(pairs[dev : dev + train // 4]), dev)]
    return TaskData("docnames", "classification", LABELS, trained, scored, [], "accuracy", notes=notes, rows_together=4)


def _all_four(pairs: list[_Pair]) -> Iterator[_Pair]:
    for pair in pairs:
        yield from itertools.product(pair, pair)


def _example(index: int, described: _Entry, named: _Entry) -> Example:
    return Example(str(index), named[0], described[1], LABELS[described == named])


def _pairs(docstrings: Iterable[Docstring], seed: int) -> Iterator[_Pair]:
    """Yield two (name in words, text) of one package at a time, every name and text once."""
    packages: dict[str, list[_Entry]] = {}
    names: set[str] = set()
    openings: set[str] = set()
    # Sorted, so that the task does not depend on the order in which modules were found.
    for doc in sorted(docstrings, key=lambda d: (d.package, d.name, d.text)):
        name, text = " ".join(name_words(doc.name)), " ".join(doc.text.split())[:_CHARS]
        opening = text[:_SAME_OPENING].lower()
        if len(text) < _MIN_CHARS or not name or name in names or opening in openings:
            continue
        names.add(name)
        openings.add(opening)
        packages.setdefault(doc.package, []).append((name, text))
    for package, entries in packages.items():
        entries.sort(key=lambda entry: _rank(seed, package, entry[1]))
        yield from zip(entries[::2], entries[1::2], strict=False)  # an odd one is left over


def _rank(seed: int, purpose: str, text: str) -> bytes:
    return hashlib.blake2b(f"{seed}\x00{purpose}\x00{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def name_words(name: str) -> list[str]:
    """Return the words of a qualified name in lower case: `http.HTTPServer.serve_forever` is http, http, server, serve, forever."""
    return [word.lower() for word in _WORD.findall(name)]


def by_overlap(train: Sequence[Example], rows: Sequence[Example]) -> list[str]:
    """Answer rows by a rule without a model: the name is the docstring's own if enough of its words occur in the text.

    What is enough, a share of the different words of the name, is the threshold that is right most often on the training rows.
    """
    shares, own = _overlaps(train)
    thresholds = np.unique(np.concatenate([shares, [np.inf]]))
    right = [float(np.mean((shares >= t) == own)) for t in thresholds]
    best = thresholds[int(np.argmax(right))]
    return [LABELS[int(share >= best)] for share in _overlaps(rows)[0]]


def _overlaps(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    shares = []
    for example in examples:
        assert example.text_b is not None
        words, text = set(example.text_a.split()), set(name_words(example.text_b))
        shares.append(len(words & text) / len(words))
    return np.array(shares), np.array([example.label == LABELS[1] for example in examples])
