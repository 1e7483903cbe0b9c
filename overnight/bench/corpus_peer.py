"""The peer of `overnight bench corpus`: examples written ahead of the training by pure Python, as BERT's authors made theirs (Devlin et al. 2018, A.2).

Written anew from their description. Sentences are tokenized a character at a time, then by the longest piece that fits; segments A and B fill a length, B is a random
one half of the time; 15 % of the tokens are masked; an example is a record of seven fields, padded. All documents are in memory. What a record costs to
encode is left out in its favor: fields are written as they lie in memory.
"""

from __future__ import annotations

import random
import struct
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LENGTH, PREDICTIONS, MASKED, SHORT = 128, 20, 0.15, 0.1
_LONGEST_WORD = 100
# Blocks of Chinese characters, which are words of their own.
_CHINESE = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))


class PurePythonTokenizer:
    """BERT's rules: words and marks, lower case without accents, then the longest pieces of the vocabulary from the left.

    Args:
        tokens: the vocabulary, id by id.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self.ids = {token: number for number, token in enumerate(tokens)}

    def tokenize(self, text: str) -> list[str]:
        """Return the pieces of a text."""
        return [token for word in self._words(text) for token in self._longest_first(word)]

    def _words(self, text: str) -> Iterator[str]:
        spaced = []
        for char in text:
            if char in " \t\n\r" or unicodedata.category(char) == "Zs":
                spaced.append(" ")
            elif char not in "\0\ufffd" and unicodedata.category(char)[0] != "C":
                chinese = any(first <= ord(char) <= last for first, last in _CHINESE)
                spaced.append(f" {char} " if chinese else char)
        for word in "".join(spaced).split():
            plain = (char for char in unicodedata.normalize("NFD", word.lower()) if unicodedata.category(char) != "Mn")
            run: list[str] = []
            for char in plain:
                if _is_mark(char):
                    if run:
                        yield "".join(run)
                    yield char
                    run = []
                else:
                    run.append(char)
            if run:
                yield "".join(run)

    def _longest_first(self, word: str) -> list[str]:
        if len(word) > _LONGEST_WORD:
            return ["[UNK]"]
        found, start = [], 0
        while start < len(word):
            for end in range(len(word), start, -1):
                token = word[start:end] if start == 0 else f"##{word[start:end]}"
                if token in self.ids:
                    break
            else:
                return ["[UNK]"]
            found.append(token)
            start = end
        return found


def _is_mark(char: str) -> bool:
    code = ord(char)
    return 33 <= code <= 47 or 58 <= code <= 64 or 91 <= code <= 96 or 123 <= code <= 126 or unicodedata.category(char)[0] == "P"


@dataclass(frozen=True)
class Example:
    """Tokens with two segments, and what is to be predicted of them."""

    tokens: list[str]
    segments: list[int]
    random_next: bool
    positions: list[int]
    labels: list[str]


def write_examples(documents: Sequence[Sequence[str]], tokens: Sequence[str], path: Path) -> int:
    """Write one copy of the examples of all documents; returns how many.

    Args:
        documents: the sentences of each.
        tokens: the vocabulary.
        path: where the records go.
    """
    rng, tokenizer = random.Random(0), PurePythonTokenizer(tokens)
    tokenized = [[found for sentence in document if (found := tokenizer.tokenize(sentence))] for document in documents]
    tokenized = [document for document in tokenized if document]
    rng.shuffle(tokenized)
    examples = [example for number in range(len(tokenized)) for example in _of_document(tokenized, number, tokens, rng)]
    rng.shuffle(examples)
    with open(path, "wb") as file:
        for example in examples:
            file.write(_record(example, tokenizer.ids))
    return len(examples)


def _of_document(documents: list[list[list[str]]], number: int, words: Sequence[str], rng: random.Random) -> Iterator[Example]:
    document, longest = documents[number], LENGTH - 3

    def target() -> int:
        return rng.randint(2, longest) if rng.random() < SHORT else longest

    wanted, chunk, size, at = target(), list[list[str]](), 0, 0
    while at < len(document):
        chunk.append(document[at])
        size += len(document[at])
        if at == len(document) - 1 or size >= wanted:
            cut = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
            a = [token for sentence in chunk[:cut] for token in sentence]
            random_next = len(chunk) == 1 or rng.random() < 0.5
            if random_next:
                b = _random_segment(documents, number, wanted - len(a), rng)
                at -= len(chunk) - cut  # what was not used comes again
            else:
                b = [token for sentence in chunk[cut:] for token in sentence]
            _shorten(a, b, longest, rng)
            if a and b:
                yield _masked(["[CLS]", *a, "[SEP]", *b, "[SEP]"], len(a) + 2, random_next, words, rng)
            wanted, chunk, size = target(), [], 0
        at += 1


def _random_segment(documents: list[list[list[str]]], number: int, wanted: int, rng: random.Random) -> list[str]:
    for _ in range(10):
        other = rng.randrange(len(documents))
        if other != number:
            break
    document, found = documents[other], list[str]()
    for sentence in document[rng.randrange(len(document)) :]:
        found += sentence
        if len(found) >= wanted:
            break
    return found


def _shorten(a: list[str], b: list[str], longest: int, rng: random.Random) -> None:
    while len(a) + len(b) > longest:
        longer = a if len(a) > len(b) else b
        longer.pop(0 if rng.random() < 0.5 else -1)


def _masked(tokens: list[str], first_of_b: int, random_next: bool, words: Sequence[str], rng: random.Random) -> Example:
    places = [place for place, token in enumerate(tokens) if token not in ("[CLS]", "[SEP]")]
    rng.shuffle(places)
    places = sorted(places[: min(PREDICTIONS, max(1, round(len(tokens) * MASKED)))])
    labels, shown = [tokens[place] for place in places], list(tokens)
    for place in places:
        draw = rng.random()
        if draw < 0.8:
            shown[place] = "[MASK]"
        elif draw < 0.9:
            shown[place] = words[rng.randrange(len(words))]
    return Example(shown, [int(place >= first_of_b) for place in range(len(tokens))], random_next, places, labels)


def _record(example: Example, ids: dict[str, int]) -> bytes:
    tokens, labels = ([ids[token] for token in each] for each in (example.tokens, example.labels))
    more, fewer = [0] * (LENGTH - len(tokens)), [0] * (PREDICTIONS - len(labels))
    fields = (
        tokens + more,
        [1] * len(tokens) + more,
        example.segments + more,
        example.positions + fewer,
        labels + fewer,
        [1] * len(labels) + fewer,
        [int(example.random_next)],
    )
    content = b"".join(array("q", field).tobytes() for field in fields)
    return struct.pack("<Q", len(content)) + content
