"""Entities of tagged words, and their F1 as conlleval counts it (Tjong Kim Sang and De Meulder 2003)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_BEGIN, _END = "BS", "ES"


class Entity(NamedTuple):
    """A run of words of one type."""

    type: str
    first: int
    """Its first word."""
    last: int
    """Its last word."""


def are_entities(labels: Iterable[str]) -> bool:
    """Return whether tags mark entities: `O`, and `B-TYPE`, `I-TYPE`, `E-TYPE` or `S-TYPE` in any of the schemes IOB1, IOB2 and IOBES."""
    labels = set(labels)
    return labels > {"O"} and all(label == "O" or (label[:1] in "BIES" and label[1:2] == "-" and len(label) > 2) for label in labels)


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of one sentence in order.

    As in conlleval an entity begins at B and S, where the type changes, and at I or E behind a word that is outside or ends an entity; so
    every sequence of tags has entities, and the schemes need not be told apart.
    """
    found: list[Entity] = []
    before, kind, begin = "O", "", 0
    for place, tag in enumerate([*tags, "O"]):
        mark, _, of = tag.partition("-")
        starts = mark != "O" and (mark in _BEGIN or before == "O" or before in _END or of != kind)
        if before != "O" and (starts or mark == "O"):
            found.append(Entity(kind, begin, place - 1))
        if starts:
            begin = place
        before, kind = mark, of
    return found


def entity_scores(right: Sequence[Sequence[str]], given: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return `f1`, `precision` and `recall` of entities, right where type, begin and end are, and `accuracy` of the tags (0 to 1).

    Args:
        right, given: the tags of each sentence.
    """
    same = wanted = found = equal = words = 0
    for gold, guess in zip(right, given, strict=True):
        a, b = set(entities(gold)), set(entities(guess))
        same, wanted, found = same + len(a & b), wanted + len(a), found + len(b)
        equal, words = equal + sum(x == y for x, y in zip(gold, guess, strict=True)), words + len(gold)
    return {
        "f1": 2 * same / (wanted + found) if wanted + found else 0.0,
        "precision": same / found if found else 0.0,
        "recall": same / wanted if wanted else 0.0,
        "accuracy": equal / words,
    }
