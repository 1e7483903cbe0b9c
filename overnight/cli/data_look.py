"""`overnight data look`: documents of a prepared folder on the terminal, in color, or as plain text or JSON lines in a pipe."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

import numpy as np

from overnight.console import Styled
from overnight.corpus.document import printable
from overnight.corpus.look import Selection, count_of_source, passages, search_pattern, selected_documents
from overnight.corpus.prepared import Decoder, Prepared, PreparedDocument, local_folder
from overnight.display import json_line, plural
from overnight.errors import ConfigError

# Characters on each side of what was found, and passages of one document.
_AROUND, _PASSAGES = 120, 3
# Documents where no option says how many: at random, and of a search or a source.
_SAMPLE, _LIMIT = 3, 20
# Sources that are named where the one asked for is none.
_SOURCES = 10


def look(options: argparse.Namespace) -> int:
    """Print documents; returns 1 where a search or a source found none.

    Raises:
        ConfigError: when options do not go together.
        DataError: when the folder or a shard of it cannot be used, or it has no such document.
    """
    for name in ("search", "regex", "source"):
        if getattr(options, name) == "":  # a script whose variable is empty would be shown documents that nothing chose
            raise ConfigError(f"--{name} '': is empty; give a text, or leave it out")
    searching = bool(options.search or options.regex)
    if options.search and options.regex:
        raise ConfigError("--search and --regex: give one of them")
    if options.number and (searching or options.source or options.random):
        raise ConfigError("--number names documents; --random, --search, --regex and --source choose them: give one or the other")
    prepared = Prepared(local_folder(options.folder))
    pattern = search_pattern(prepared, options.search or "", options.regex or "", options.ignore_case)
    if searching and pattern is None:
        raise ConfigError(f"--search {options.search!r}: is empty; give a word or a phrase")
    sample = options.random or (options.limit or _SAMPLE if not (searching or options.number or options.source) else 0)
    limit = options.limit or (_LIMIT if not (options.number or sample) else None)
    selection = Selection(options.split, options.number or (), sample, options.seed, options.source or "")
    out, shown, read = Styled(), 0, 0
    for document in selected_documents(prepared, selection):
        read += 1
        text = prepared.decoder.text(document.tokens) if pattern else ""
        if pattern and not pattern.search(text):
            continue
        shown += 1
        if options.json:
            out.print(json_line(_record(document, prepared.decoder, options), sys.stdout))
        else:
            _show(document, prepared.decoder, pattern, text, options, out)
        if shown == limit:
            if not (options.number or sample):
                where = f"that source in {options.split}" if options.source else options.split
                _say(f"{plural(shown, 'document')} shown of the first {read:,} of {where}; --limit shows more")
            return 0
    if searching and (read or not options.source):
        _say(
            f"{plural(shown, 'document')} found, of {read:,}{' of that source' if options.source else ''} looked through in {options.split}"
        )
    elif options.source:
        _say(_of_source(prepared, options, read))
    return 0 if shown else 1


def _of_source(prepared: Prepared, options: argparse.Namespace, read: int) -> str:
    """Return how many documents were shown of how many of a source; where it has none, which splits or which other sources have some."""
    source, split = options.source, options.split
    if read:
        count = count_of_source(prepared, split, source)
        if read < count:
            return f"{read:,} of the {count:,} documents of that source in {split}, at random"
        return f"{plural(read, 'document')} found, of {read:,} of that source in {split}"
    counts = {other: count_of_source(prepared, other, source) for other in prepared.splits() if other != split}
    if elsewhere := [f"{other} has {count:,}: --split {other}" for other, count in counts.items() if count]:
        return f"no document of that source in {split}; {'; '.join(elsewhere)}"
    names = [source.name or source.path for source in prepared.manifest.sources]
    if any(printable(source) in name for known in prepared.manifest.sources for name in (known.name, known.path)):
        return "no document of that source is in the folder"
    more = ", ..." if len(names) > _SOURCES else ""
    return f"no name of a document or a source has {source!r} in it; sources are {', '.join(names[:_SOURCES])}{more}"


def _say(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr)


def _record(document: PreparedDocument, decoder: Decoder, options: argparse.Namespace) -> dict[str, object]:
    """Return a document as JSON has it."""
    found: dict[str, object] = {"split": document.split, "number": document.number, "name": document.name, "source": document.source}
    if document.label is not None:
        found["label"] = document.label
    found["text"] = decoder.text(document.tokens)
    if options.sentences:
        found["sentences"] = [decoder.text(tokens) for tokens in _sentences(document)]
    if options.tokens:
        found["tokens"] = document.tokens.tolist()
    return found


def _sentences(document: PreparedDocument) -> Iterator[np.ndarray]:
    yield from np.split(document.tokens, np.cumsum(document.lengths)[:-1])


def _show(
    document: PreparedDocument, decoder: Decoder, pattern: re.Pattern[str] | None, text: str, options: argparse.Namespace, out: Styled
) -> None:
    """Print a document below a line that says which it is."""
    facts = [plural(len(document.tokens), "byte" if decoder.is_bytes else "token")]
    facts += [] if decoder.is_bytes else [plural(len(document.lengths), "sentence")]
    facts += [f"label {document.label:g}"] if document.label is not None else []
    name = f"  {document.name}" if document.name else ""
    out.print((f"{document.split} {document.number:,}", "bold cyan"), (name, "bold"), (f"  {', '.join(facts)}", "dim"))
    if pattern and not (options.whole or options.sentences or options.tokens):
        for before, found, after in passages(text, pattern, _AROUND, _PASSAGES):
            out.print("  ... ", _one_line(before), (_one_line(found), "bold reverse"), _one_line(after), " ...")
        out.print()
        return
    left, cut = sys.maxsize if options.whole else options.characters, False
    for number, tokens in enumerate(_sentences(document) if options.sentences or options.tokens else [document.tokens], 1):
        if left <= 0:
            cut = True
            break
        # A token has a character at least, so more of them cannot be shown.
        parts: list[str | tuple[str, str]] = _token_parts(tokens[:left], decoder) if options.tokens else [decoder.text(tokens)]
        length = sum(len(part) for part in parts if isinstance(part, str))
        head = [(f"{number:>5}  ", "dim")] if options.sentences or options.tokens else []
        out.print(*head, *(parts if length <= left else _cut(parts, left)))
        left, cut = left - length, length > left
    if cut:
        out.print(("  ... cut here; --whole shows all of it", "dim"))
    out.print()


def _one_line(text: str) -> str:
    return re.sub(r"\s", " ", text)


def _token_parts(tokens: np.ndarray, decoder: Decoder) -> list[str | tuple[str, str]]:
    """Return tokens as the vocabulary has them, each with its id."""
    parts: list[str | tuple[str, str]] = []
    for token in tokens.tolist():
        parts += [decoder.tokens[token], (f"/{token} ", "dim")]
    return parts


def _cut(parts: list[str | tuple[str, str]], left: int) -> Iterator[str | tuple[str, str]]:
    """Yield parts until so many characters of text were; those with a style of their own are not of the text."""
    for part in parts:
        if isinstance(part, str):
            if left <= 0:
                return
            part = part[:left]
            left -= len(part)
        yield part
