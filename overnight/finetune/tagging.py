"""Tags of words: sentences to sequences of tokens, and outputs of the network back to one tag a word.

A word is tagged at its first token, as in Devlin et al. 2018, section 5.3; its other tokens have no label.
Shapes: T tokens of a sequence, C tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from overnight.batches.packing import IGNORED
from overnight.finetune.encode import read_as_text
from overnight.tasks.conll import Sentence

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from overnight.corpus.tokenizer import Vocabulary


@dataclass(frozen=True)
class TaggedPart:
    """A sequence of tokens, which holds a whole sentence or as many of its words as there is room for."""

    sentence: int
    """Its place among the sentences."""
    first_word: int
    places: npt.NDArray[np.int32]
    """Place in the sequence of the first token of each of its words."""
    ids: npt.NDArray[np.int32]
    """(T,) with [CLS] and [SEP]."""
    labels: npt.NDArray[np.int64]
    """(T,) number of the tag at the first token of each word, -100 elsewhere and where it is not known."""


def encode_sentences(
    tokenizer: Tokenizer, vocabulary: Vocabulary, sentences: Sequence[Sentence], labels: Sequence[str], length: int
) -> list[TaggedPart]:
    """Return the sequences of sentences, in order; one that is too long continues in a further sequence at its next word.

    Args:
        tokenizer: without truncation or padding.
        vocabulary: gives the ids of [CLS], [SEP] and [UNK], which stands for a word without a token.
        labels: the tags, in the order of the network's outputs.
        length: most tokens of a sequence (T); a word that is longer is cut.
    """
    read_as_text(tokenizer)
    words = list(dict.fromkeys(word for sentence in sentences for word in sentence.words))
    unknown = [vocabulary.unk]
    tokens_of = {
        w: (e.ids or unknown)[: length - 2] for w, e in zip(words, tokenizer.encode_batch(words, add_special_tokens=False), strict=True)
    }
    number = {label: i for i, label in enumerate(labels)}
    parts: list[TaggedPart] = []
    for place, sentence in enumerate(sentences):
        first = 0
        while first < len(sentence.words):
            ids, at, last = [vocabulary.cls], [], first
            while last < len(sentence.words) and len(ids) + len(tokens_of[sentence.words[last]]) < length:
                at.append(len(ids))
                ids += tokens_of[sentence.words[last]]
                last += 1
            target = np.full(len(ids) + 1, IGNORED, np.int64)
            if sentence.tags is not None:
                target[at] = [number[tag] for tag in sentence.tags[first:last]]
            parts.append(TaggedPart(place, first, np.array(at, np.int32), np.array([*ids, vocabulary.sep], np.int32), target))
            first = last
    return parts


def tags_of(
    parts: Sequence[TaggedPart], outputs: Sequence[npt.NDArray[np.floating[Any]]], labels: Sequence[str], sentences: int
) -> list[tuple[list[str], list[float]]]:
    """Return the tag of every word of each sentence, and its probability.

    Args:
        parts: of :func:`encode_sentences`.
        outputs: (T or more, C) logits of each.
        labels: the tags (C).
        sentences: their number.
    """
    found: list[tuple[list[str], list[float]]] = [([], []) for _ in range(sentences)]
    for part, output in zip(parts, outputs, strict=True):
        logits = output[part.places].astype(np.float64)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        best = logits.argmax(-1)
        tags, p = found[part.sentence]
        assert len(tags) == part.first_word
        tags += [labels[i] for i in best]
        p += shares[np.arange(len(best)), best].tolist()
    return found


def conll_text(sentences: Sequence[Sentence], given: Sequence[Sequence[str]]) -> str:
    """Return sentences as conlleval reads them, a line a word: the word, its tag and the one that was given.

    White space in a word or a tag becomes `_`: a blank would begin another column, and the end of a line another word.
    """
    blanks = dict.fromkeys(b" \t\n\r", "_")
    lines: list[str] = []
    for sentence, answers in zip(sentences, given, strict=True):
        for columns in zip(sentence.words, sentence.tags or (), answers, strict=True):
            lines.append(" ".join(column.translate(blanks) for column in columns))
        lines.append("")
    return "".join(f"{line}\n" for line in lines)
