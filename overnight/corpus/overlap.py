"""Text that a prepared folder shares with evaluations, by its word n-grams: how much of an evaluation the training has seen.

Both sides are compared as the folder's vocabulary has them, so that case and accents are the same on both. What it does not know, such as a kind of
quotation mark, is no word on either. An evaluation is looked for as it is and without its markup, as documents are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from overnight.corpus.bytes import without_markup
from overnight.corpus.clean import clean
from overnight.corpus.decontaminate import Lookup, evaluation_texts, in_batches, ngrams
from overnight.corpus.prepared import Prepared, PreparedDocument
from overnight.corpus.tokenizer import load_tokenizer
from overnight.errors import DataError

# Of a text that is shown, and about so many of a token.
_CHARACTERS, _OF_A_TOKEN = 200, 4


@dataclass(frozen=True)
class Match:
    """A document that shares words with a text of an evaluation."""

    document: PreparedDocument
    path: str
    """Of the evaluation."""
    text: str
    """The beginning of its text, one of them."""


@dataclass
class PathOverlap:
    """What was found of one path of evaluations."""

    path: str
    texts: int = 0
    long: int = 0
    """Texts that have enough words to be looked for."""
    found: int = 0
    """Those of them that share an n-gram with a document."""
    documents: int = 0
    """Documents that share one with any of them."""


@dataclass
class Overlap:
    """What a split shares with evaluations."""

    read: int = 0
    """Documents of the split."""
    documents: int = 0
    """Those that share an n-gram with any evaluation."""
    paths: list[PathOverlap] = field(default_factory=list)
    samples: list[Match] = field(default_factory=list)


def find_overlap(prepared: Prepared, split: str, paths: Sequence[str], n: int, samples: int) -> Overlap:
    """Return what the documents of a split share with the texts of evaluations.

    Args:
        prepared: the folder.
        split: train, valid or test.
        paths: as of `data.decontaminate`.
        n: words in a row that count as shared.
        samples: documents to keep for people, the first ones.

    Raises:
        DataError: when the folder, the split or a path cannot be used, or no text of a path has n words.
    """
    if not prepared.manifest.count(split, "documents"):
        raise DataError(f"{prepared.folder}: {split} holds no document; there is {', '.join(prepared.splits()) or 'nothing'}")
    result, starts, hashes, of_text = Overlap(), [0], [], []
    for path in paths:
        counts = PathOverlap(path)
        for batch in in_batches(evaluation_texts(path, "--with"), len):
            long = np.zeros(len(batch), bool)
            for form in (str, without_markup if prepared.decoder.is_bytes else clean):
                found, ends = ngrams(_as_prepared(prepared, list(map(form, batch))), n)
                lengths = np.diff(ends, prepend=0)
                long |= lengths > 0
                hashes.append(found)
                of_text.append(np.repeat(starts[-1] + counts.texts + np.arange(len(batch)), lengths))
            counts.texts, counts.long = counts.texts + len(batch), counts.long + int(np.count_nonzero(long))
        if not counts.long:
            raise DataError(f"--with {path}: no text of it has {n} words that the vocabulary knows; lower --words")
        starts.append(starts[-1] + counts.texts)
        result.paths.append(counts)
    wanted, entries = np.unique(np.concatenate(hashes), return_inverse=True)
    search = _Search(Lookup(wanted), entries, np.concatenate(of_text), np.array(starts), n)
    chosen: list[tuple[PreparedDocument, int]] = []
    for documents in in_batches(prepared.documents(split), lambda document: _OF_A_TOKEN * len(document.tokens)):
        result.read += len(documents)
        texts = [_of_known_tokens(prepared, document.tokens) for document in documents]
        chosen += [(documents[row], text) for row, text in search.read(texts, result, samples - len(chosen))]
    search.count(result)
    shown = _texts(paths, {text for _, text in chosen})
    for document, text in chosen:
        result.samples.append(Match(document, result.paths[int(np.searchsorted(starts, text, "right")) - 1].path, shown[text]))
    return result


class _Search:
    """N-grams of evaluations, and which of them were found.

    Args:
        lookup: the distinct ones, W of them.
        entries: int64 [E]: which of the distinct ones each n-gram of each text is.
        of_text: int64 [E]: its text, counted over all paths.
        starts: int64 [P + 1]: first text of each path, and their number.
        n: words.
    """

    def __init__(self, lookup: Lookup, entries: np.ndarray, of_text: np.ndarray, starts: np.ndarray, n: int) -> None:
        self.lookup, self.entries, self.of_text, self.starts, self.n = lookup, entries, of_text, starts, n
        self.found = np.zeros(len(lookup.wanted), bool)
        of_path = np.searchsorted(starts, of_text, "right") - 1
        self.in_path = np.zeros((len(starts) - 1, len(lookup.wanted)), bool)
        self.in_path[of_path, entries] = True
        self.a_text = np.zeros(len(lookup.wanted), np.int64)
        self.a_text[entries[::-1]] = of_text[::-1]

    def read(self, documents: Sequence[str], result: Overlap, samples: int) -> list[tuple[int, int]]:
        """Look through some documents; return which are the first of those with something, each with a text of an evaluation."""
        hashes, ends = ngrams(documents, self.n)
        at, which = self.lookup.find(hashes)
        self.found[which] = True
        rows = np.searchsorted(ends, at, "right")
        result.documents += len(np.unique(rows))
        for path, counts in enumerate(result.paths):
            counts.documents += len(np.unique(rows[self.in_path[path, which]]))
        chosen, first = np.unique(rows, return_index=True)
        pairs = zip(chosen[:samples].tolist(), first[:samples].tolist(), strict=True)
        return [(row, int(self.a_text[which[place]])) for row, place in pairs]

    def count(self, result: Overlap) -> None:
        """Count the texts of each path that were found."""
        texts = np.unique(self.of_text[self.found[self.entries]])
        for counts, number in zip(result.paths, np.diff(np.searchsorted(texts, self.starts)).tolist(), strict=True):
            counts.found = number


def _as_prepared(prepared: Prepared, texts: Sequence[str]) -> Sequence[str]:
    """Return texts as they would be read from the folder again."""
    if prepared.decoder.is_bytes:
        return texts
    encoded = load_tokenizer(prepared.folder).encode_batch(texts, add_special_tokens=False)
    return [_of_known_tokens(prepared, np.array(each.ids, np.int64)) for each in encoded]


def _of_known_tokens(prepared: Prepared, tokens: np.ndarray) -> str:
    """Return the text of tokens [N] but for `[UNK]`, which stands for a mark or a character that no word of the vocabulary has."""
    decoder = prepared.decoder
    return decoder.text(tokens if decoder.is_bytes else tokens[tokens != decoder.tokens.index("[UNK]")])


def _texts(paths: Sequence[str], wanted: set[int]) -> dict[int, str]:
    """Return the beginnings of some texts by their number, counted over all paths."""
    number = 0
    found: dict[int, str] = {}
    for path in paths:
        if len(found) == len(wanted):
            break
        for text in evaluation_texts(path, "--with"):
            if number in wanted:
                found[number] = " ".join(text.split())[:_CHARACTERS]
            number += 1
    return found
