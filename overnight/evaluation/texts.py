"""The text on which models are compared: passages of documents, the same for every model, whatever its tokens.

A passage is some sentences of one document in order. Which are taken is decided by their hash, so that any part of the sources has the same chance.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import xxhash

from overnight.config import Data
from overnight.corpus.clean import clean
from overnight.corpus.named_sources import named_paths
from overnight.corpus.readers import documents, start_reading
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import load_manifest, open_shards
from overnight.corpus.tokenizer import load_tokenizer, load_vocabulary
from overnight.errors import DataError

# A passage ends with the sentence that reaches this: some sequences of 128 tokens, so that few of them are short.
PASSAGE_CHARACTERS, PASSAGE_TOKENS = 2000, 500
# Of a text, by default.
MAX_TOKENS = 200_000
# What `--max-tokens` counts of raw text, where each model has tokens of its own.
CHARACTERS_PER_TOKEN = 4
_SPLITS = ("valid", "train")
Item = TypeVar("Item")


class NothingToPredictError(DataError):
    """No token of a text can be masked and predicted.

    Args:
        reason: what is wrong with which text.
        remedy: what to do about it where the text was asked for.
    """

    def __init__(self, reason: str, remedy: str = "name another with --text") -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


@dataclass(frozen=True)
class Text:
    """Passages to predict masked tokens of."""

    name: str
    """Where they are from: `valid` or `train` of a run's own data, `FOLDER, valid` of other prepared data, or the files; with how many tokens where they are not :data:`MAX_TOKENS`."""
    passages: list[str]

    @property
    def characters(self) -> int:
        """Characters of all passages."""
        return sum(map(len, self.passages))


def text_of_files(data: Data, max_tokens: int) -> Text:
    """Return passages of raw text, read and cleaned as by data preparation; equal ones count once.

    Args:
        data: paths and formats.
        max_tokens: about how many are taken, at four characters each, so that all models see the same characters.

    Raises:
        NothingToPredictError: when they hold no text.
        DataError: a source is missing, empty or damaged (see :mod:`overnight.corpus.readers`).
    """
    try:
        kept = sample(((passage.encode(), len(passage), passage) for passage in _of_files(data)), max_tokens * CHARACTERS_PER_TOKEN)
    except DataError as error:  # of a reader, which knows the key of a recipe
        raise DataError(str(error).replace("data.paths", "--text")) from None
    where = ", ".join(path for _, path in named_paths(data))
    # A file may be called as the splits of a run are.
    name = f"./{where}" if where.partition(",")[0] in _SPLITS else where
    return Text(_named(name, max_tokens), _some(kept, f"{where}: holds no text to predict"))


def _named(where: str, max_tokens: int) -> str:
    """Return the name of a text: its scores on other numbers of tokens stand beside each other, none for another."""
    return where + ("" if max_tokens == MAX_TOKENS else f", {max_tokens:,} tokens")


def _of_files(data: Data) -> Iterator[str]:
    for document in documents(data, start_reading(data)):
        yield from _passages(clean(document.text))


def _passages(text: str) -> Iterator[str]:
    """Yield the passages of cleaned text: a space for the end of a paragraph, and between sentences where the text has one, which is not so in Chinese."""
    passage, end = "", 0
    for sentence in sentences(text):
        start = text.index(sentence, end)
        passage += (" " if passage and start > end else "") + sentence
        end = start + len(sentence)
        if len(passage) + 1 >= PASSAGE_CHARACTERS:
            yield passage
            passage = ""
    if passage:
        yield passage


def text_of_shards(folder: Path, split: str, max_tokens: int = MAX_TOKENS, own: bool = True) -> Text:
    """Return passages of a split of prepared data, decoded: normalized text, in lower case where its vocabulary is.

    Sentences with an unknown token are left out, since what stood there is not known.

    Args:
        folder: prepared WordPiece tokens.
        split: train or valid.
        max_tokens: about how many are taken.
        own: whether it is the data of the run that is measured; else the text is named after the folder.

    Raises:
        NothingToPredictError: when it holds no sentence of that split whose tokens are all known.
        DataError: when the folder is not prepared, or is of bytes.
    """
    if load_manifest(folder).settings.get("tokenizer") == "bytes":
        raise DataError(f"{folder}: holds bytes, prepared for a byte model; name data of WordPiece tokens, or raw text with --text")
    unknown, tokenizer = load_vocabulary(folder).unk, load_tokenizer(folder)

    def passages() -> Iterator[tuple[bytes, int, list[list[int]]]]:
        for shard in open_shards(folder, split):
            for start, end in _sentence_ranges(shard.sentence_starts, shard.document_sentences):
                bounds = shard.sentence_starts[start : end + 1]
                tokens = shard.tokens[bounds[0] : bounds[-1]]
                split_up = [part.tolist() for part in np.split(tokens, bounds[1:-1] - bounds[0])]
                yield tokens.tobytes(), len(tokens), [part for part in split_up if unknown not in part]

    kept = (tokenizer.decode_batch(parts) for parts in sample(passages(), max_tokens))
    where = f"{folder}, {split}"
    why = "each of its sentences has an unknown token" if load_manifest(folder).count(split, "tokens") else "holds no text to predict"
    return Text(_named(split if own else where, max_tokens), _some([" ".join(found) for found in kept if found], f"{where}: {why}"))


def _sentence_ranges(sentence_starts: np.ndarray, document_sentences: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the sentences [start, end) of each passage."""
    for first, last in zip(document_sentences[:-1].tolist(), document_sentences[1:].tolist(), strict=True):
        while first < last:
            wanted = np.searchsorted(sentence_starts, sentence_starts[first] + PASSAGE_TOKENS, side="left")
            end = min(int(wanted), last)
            yield first, end
            first = end


def sample(items: Iterable[tuple[bytes, int, Item]], most: int) -> list[Item]:
    """Return items of least hash until they reach a size, in their order; all of a stream that is smaller. Equal ones count once.

    Args:
        items: what is hashed, the size, and what to return of each.
        most: sum of the sizes that is wanted.
    """
    kept: list[tuple[int, int, int, Item]] = []  # largest hash first
    hashes: set[int] = set()
    total = 0
    for number, (content, size, item) in enumerate(items):
        if (hashed := xxhash.xxh3_64_intdigest(content)) in hashes:
            continue
        heapq.heappush(kept, (-hashed, -number, size, item))
        hashes.add(hashed)
        total += size
        while total - kept[0][2] >= most and len(kept) > 1:
            negative, _, dropped, _ = heapq.heappop(kept)
            hashes.remove(-negative)
            total -= dropped
    return [item for *_, item in sorted(kept, key=lambda entry: -entry[1])]


def _some(passages: list[str], none: str) -> list[str]:
    found = [passage for passage in passages if passage]
    if not found:
        raise NothingToPredictError(none)
    return found
