"""`overnight data overlap`: which evaluations a prepared folder has text of, in words or as one JSON object."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict

from overnight.console import table
from overnight.corpus.overlap import Overlap, find_overlap
from overnight.corpus.prepared import Prepared, local_folder
from overnight.display import for_stream, json_line, plural, share
from overnight.errors import ConfigError, DataError


def overlap(options: argparse.Namespace) -> int:
    """Print what documents share with evaluations; returns 1 where they share something.

    Raises:
        ConfigError: when the folder or an evaluation cannot be used: 1 is for what was found.
    """
    try:
        found = find_overlap(Prepared(local_folder(options.folder)), options.split, options.paths, options.words, options.samples)
    except DataError as error:
        raise ConfigError(str(error)) from None
    if options.json:
        print(json_line(_record(found, options.split, options.words), sys.stdout))
    else:
        for line in _lines(found, options.split, options.words):
            print(for_stream(line, sys.stdout))
    return int(found.documents > 0)


def _record(found: Overlap, split: str, words: int) -> dict[str, object]:
    samples = [
        {"split": s.document.split, "number": s.document.number, "name": s.document.name, "path": s.path, "text": s.text}
        for s in found.samples
    ]
    paths = [asdict(counts) for counts in found.paths]
    return {"split": split, "words": words, "read": found.read, "documents": found.documents, "paths": paths, "samples": samples}


def _lines(found: Overlap, split: str, words: int) -> Iterator[str]:
    head = ["evaluation", "texts", f"of {words} words", "found", "", "in documents"]
    rows = [
        [each.path, f"{each.texts:,}", f"{each.long:,}", f"{each.found:,}", share(each.found / each.long), f"{each.documents:,}"]
        for each in found.paths
    ]
    yield table([head, *rows])
    of = f"of {plural(found.read, 'document')} of {split}"
    yield f"{found.documents:,} {of} {'shares' if found.documents == 1 else 'share'} {plural(words, 'word')} in a row with a text of them"
    for sample in found.samples:
        document = sample.document
        yield f"  {document.split} {document.number:,}{f', {document.name}' if document.name else ''}: {sample.path}: {sample.text}"
    if found.documents > len(found.samples):
        yield f"  and {found.documents - len(found.samples):,} more; --samples shows them, `overnight data look` their text"
