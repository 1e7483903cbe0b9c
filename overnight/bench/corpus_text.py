"""Text for `overnight bench corpus`: the first megabytes of a source, and more text than there is, recombined from its sentences."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from overnight.config import Data
from overnight.corpus.clean import clean
from overnight.corpus.readers import documents, start_reading
from overnight.corpus.sentences import sentences

# Of so many bytes the sentences are recombined; and the share of words that are new ones, so that the vocabulary grows with the text as real ones do.
_POOL, _NEW_WORDS = 16_000_000, 0.003


def texts(source: str, size: float) -> Iterator[str]:
    """Yield the documents of a source of `data.paths` until they are so many bytes, the last one cut; all of them where size is 0."""
    data, left = Data(paths=[source]), int(size)
    for document in documents(data, start_reading(data)):
        content = document.text.encode()
        yield document.text if not size else content[:left].decode(errors="ignore")
        left -= len(content)
        if size and left <= 0:
            return


def recombined(source: str, size: float) -> Iterator[str]:
    """Yield documents of sentences drawn at random from those of a source, as long as its documents are, until they are so many bytes.

    Two of them have few sentences in common, so none is a near-duplicate. Some words are made of the halves of two others.
    """
    rng, originals = random.Random(0), [clean(text) for text in texts(source, _POOL)]
    pool = list(chain.from_iterable(map(sentences, originals)))
    sizes, left = [len(text.encode()) for text in originals], size
    characters, mean = (sum(map(len, each)) / len(pool) + 1 for each in (pool, [sentence.encode() for sentence in pool]))
    while left > 0:
        count = max(1, round(min(rng.choice(sizes), left) / mean))
        drawn = rng.choices(pool, k=count)
        for _ in range(round(count * characters / 6 * _NEW_WORDS)):
            place = rng.randrange(count)
            words = drawn[place].split(" ")
            one, other = rng.choice(words), rng.choice(rng.choice(pool).split(" "))
            words[rng.randrange(len(words))] = one[: len(one) // 2 + 1] + other[len(other) // 2 :]
            drawn[place] = " ".join(words)
        text = " ".join(drawn)
        left -= len(text.encode())
        yield text


def pack(found: Iterator[str], path: Path) -> int:
    """Write texts as files of a .tar.xz, packed at the fastest level; returns their bytes."""
    total = 0
    with tarfile.open(path, "w:xz", preset=0) as archive:
        for number, text in enumerate(found):
            content = text.encode()
            entry = tarfile.TarInfo(f"text/{number:07d}.txt")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
            total += len(content)
    return total
