"""`overnight data diff`: what differs between two prepared folders, in words or as one JSON object."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from overnight.console import table
from overnight.corpus.compare import (
    DocumentChange,
    Place,
    Row,
    VocabularyChange,
    compare_documents,
    compare_vocabularies,
    count_rows,
    first_difference,
    setting_rows,
)
from overnight.corpus.prepared import Prepared, local_folder
from overnight.display import for_stream, json_line, plural, yaml_text
from overnight.errors import ConfigError, DataError

# Tokens of a vocabulary, and characters of a document, that are shown.
_TOKENS, _CHARACTERS = 20, 160


def diff(options: argparse.Namespace) -> int:
    """Print what differs; returns 1 where something does.

    Raises:
        ConfigError: when a folder, or a shard of it, cannot be used: 1 is for a difference.
    """
    try:
        return _compare(Prepared(local_folder(options.folder)), Prepared(local_folder(options.other)), options)
    except DataError as error:
        raise ConfigError(str(error)) from None


def _compare(a: Prepared, b: Prepared, options: argparse.Namespace) -> int:
    for each in (a, b):
        each.verify()
    settings, counts = setting_rows(a.manifest, b.manifest), count_rows(a.manifest, b.manifest)
    vocabulary = compare_vocabularies(a, b) if a.manifest.tokenizer != b.manifest.tokenizer else None
    same = a.manifest.fingerprint() == b.manifest.fingerprint()
    documents = None if same else compare_documents(a, b, options.samples)
    if options.json:
        print(json_line(_record(settings, counts, vocabulary, documents), sys.stdout))
    else:
        for line in _lines(a, b, settings, counts, vocabulary, documents):
            print(for_stream(line, sys.stdout))
    return int(bool(settings or counts or vocabulary or not same))


def _record(
    settings: list[Row], counts: list[Row], vocabulary: VocabularyChange | None, documents: DocumentChange | None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "settings": {name: [one, two] for name, one, two in settings},
        "counts": {name: [one, two] for name, one, two in counts},
        "vocabulary": vocabulary and dataclasses.asdict(vocabulary),
        "documents": documents and dataclasses.asdict(documents),
    }
    if documents:
        for kind, pairs in (("moved", documents.moved), ("other_source", documents.other_source)):
            found["documents"][kind] = {f"{before or '-'} to {after or '-'}": count for (before, after), count in pairs.items()}
    return found


def _lines(
    a: Prepared, b: Prepared, settings: list[Row], counts: list[Row], vocabulary: VocabularyChange | None, documents: DocumentChange | None
) -> Iterator[str]:
    yield f"A: {a.folder}\nB: {b.folder}"
    for title, rows in (("settings", settings), ("counts", counts)):
        if rows:
            cells = [[name, _cell(one), _cell(two)] for name, one, two in rows]
            yield "\n" + table([[title, "A", "B"], *cells])
    if vocabulary:
        yield "\nvocabulary"
        for words, tokens in (("only in A", vocabulary.lost), ("only in B", vocabulary.gained)):
            more = ", ..." if len(tokens) > _TOKENS else ""
            yield f"  {plural(len(tokens), 'token')} {words}{': ' if tokens else ''}{', '.join(tokens[:_TOKENS])}{more}"
        yield f"  {plural(vocabulary.renumbered, 'token')} of both with another id"
    if documents is None:
        yield "\nthe shards and the vocabulary are the same" if settings or counts else "\nnothing differs"
        return
    yield f"\ndocuments, compared by {documents.by}\n  {documents.same:,} in both"
    yield from _moved(a, documents)
    if documents.other_source:
        yield f"  {documents.other_source.total():,} of them of another source: {_kinds(documents.other_source)}"
    yield from _changed(a, b, documents)
    for words, count, each, places in (
        ("only in A", documents.only_a, a, documents.samples["only_a"]),
        ("only in B", documents.only_b, b, documents.samples["only_b"]),
    ):
        yield f"  {count:,} {words}"
        for place in places:
            yield f"    {_called(each, place)}: {_start(each, place)}"
    if not (documents.moved or documents.other_source or documents.changed or documents.only_a or documents.only_b or vocabulary):
        yield "  the shards differ only in how documents are ordered, divided into sentences or labeled"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else yaml_text(value)


def _kinds(counts: Counter[tuple[str, str]]) -> str:
    return ", ".join(f"{count:,} from {before or '-'} to {after or '-'}" for (before, after), count in sorted(counts.items()))


def _moved(a: Prepared, documents: DocumentChange) -> Iterator[str]:
    if documents.moved:
        yield f"  {documents.moved.total():,} of them in another split: {_kinds(documents.moved)}"
    for place, (split, number) in documents.samples["moved"]:
        yield f"    {_called(a, place)}: now {split} {number:,}"


def _changed(a: Prepared, b: Prepared, documents: DocumentChange) -> Iterator[str]:
    if a.table and b.table:
        yield f"  {documents.changed:,} of the same name with another text"
    for one, two in documents.samples["changed"]:
        texts = (each.decoder.text(each.document(*place).tokens) for each, place in ((a, one), (b, two)))
        before, left, right = first_difference(next(texts), next(texts))
        yield f"    {_called(a, one)}{f': ... {before}' if before else ''}\n      A: {left or '(nothing)'}\n      B: {right or '(nothing)'}"


def _called(prepared: Prepared, place: Place) -> str:
    document = prepared.document(*place)
    return f"{place[0]} {place[1]:,}" + (f", {document.name}" if document.name else "")


def _start(prepared: Prepared, place: Place) -> str:
    tokens = prepared.document(*place).tokens
    text = " ".join(prepared.decoder.text(tokens[: 4 * _CHARACTERS]).split())
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} ..."
