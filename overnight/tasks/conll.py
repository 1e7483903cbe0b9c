"""Sentences whose words have tags: CoNLL files (one word a line), or JSON lines with `tokens` and `tags`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from overnight.display import plural
from overnight.errors import DataError, first_names
from overnight.state_files import is_text, parse_json
from overnight.tasks.examples import split_off, trained_on_note
from overnight.tasks.rows import NO_TEXT
from overnight.tasks.tables import files_called, read_text

ENDINGS = (".conll", ".conllu", ".iob", ".iob2", ".bio", ".txt", ".jsonl")
_SPLITS = {"train": ("train",), "dev": ("dev", "valid", "validation", "testa"), "test": ("test", "testb")}
CONLL_ENDINGS = (*(ending for ending in ENDINGS if ending != ".jsonl"), *(f".{stem}" for stems in _SPLITS.values() for stem in stems))
"""Of files that a folder is searched for, and that have one word a line."""
DOCUMENT = "-DOCSTART-"
"""A file of CoNLL-2003 separates its documents by lines that begin so."""
# More tags than this are words, or ids, in the column of the tags.
_MOST_TAGS = 1000

# Columns of CoNLL-U: the number of a word, its form, its lemma, its part of speech, and six others.
_CONLL_U = 10
_COMMENT = re.compile(r"# \w+( \w+)? = ")
_AS_TWO_COLUMNS = r"""awk -F'\t' '/^([0-9]+\t|$)/ {print $2 "\t" $4}' FILE.conllu > FILE.conll"""


@dataclass(frozen=True)
class Sentence:
    """Words, and what each is tagged with (None where that is not known)."""

    id: str
    """Its number in the file, from 0; of JSON lines its `id`, where it has one."""
    words: tuple[str, ...]
    tags: tuple[str, ...] | None


@dataclass(frozen=True)
class TokenData:
    """A task of tagging words, read into memory."""

    labels: tuple[str, ...]
    """The tags of the training sentences; `O` first, the others sorted."""
    train: list[Sentence]
    dev: list[Sentence]
    test: list[Sentence]
    """Empty where there is none; its tags may be None."""
    notes: tuple[str, ...]


def load_tokens(path: Path, seed: int = 0, dev: Path | None = None, share: float = 0.1) -> TokenData:
    """Read a task of tagging words.

    Args:
        path: a folder with `train.*` and, optionally, `dev.*` (`valid.*`, `testa.*`) and `test.*` (`testb.*`), or the file to train on.
        seed: which sentences are split off where there is no dev file.
        dev: the file to score on, instead of that in the folder.
        share: of the sentences that is split off.

    Raises:
        DataError: a file that is missing, a line without a tag, a tag that the training sentences lack; naming file and line or sentence.
    """
    files = {"train": path} if path.is_file() else {name: found for name in _SPLITS if (found := _find(path, name))}
    if "train" not in files:
        wanted = ", ".join(f"train{ending}" for ending in ENDINGS)
        raise DataError(f"{path}: has none of {wanted}" if path.is_dir() else f"{path}: does not exist; name a file or a folder")
    if dev is not None:
        files["dev"] = dev
    parts = {name: read_sentences(file, tagged=name != "test") for name, file in files.items()}
    tags = {tag for sentence in parts["train"] for tag in sentence.tags or ()}
    if not 2 <= len(tags) <= _MOST_TAGS:
        raise DataError(
            f"{files['train']}: has {len(tags)} different tags; the last column of a line is its tag, 2 to {_MOST_TAGS} of them"
        )
    for name in ("dev", "test"):
        _check_tags(files.get(name, path), parts.get(name, []), tags)
    if "dev" in parts:
        notes = trained_on_note([s.words for s in parts["train"]], [s.words for s in parts["dev"]], "sentences to score on")
    else:
        rows = parts["train"]
        scored = split_off([" ".join(sentence.words) for sentence in rows], [""] * len(rows), seed, share, str(path))
        parts["train"], parts["dev"] = ([s for i, s in enumerate(rows) if (i in scored) == side] for side in (False, True))
        notes = (f"scored on {plural(len(parts['dev']), 'sentence')} split off {files['train'].name} by a hash of their words",)
    labels = tuple(sorted(tags, key=lambda tag: (tag != "O", tag)))
    return TokenData(labels, parts["train"], parts["dev"], parts.get("test", []), notes)


def _check_tags(path: Path, sentences: list[Sentence], known: set[str]) -> None:
    unknown = [(sentence.id, tag) for sentence in sentences for tag in sentence.tags or () if tag not in known]
    if not unknown:
        return
    tags, count = list(dict.fromkeys(repr(tag) for _, tag in unknown)), len({sentence for sentence, _ in unknown})
    more = f"; {count:,} of {len(sentences):,} sentences have one of these: {first_names(tags)}" if count > 1 else ""
    raise DataError(f"{path}: sentence {unknown[0][0]} has tag {tags[0]}, which no training sentence has{more}")


def _find(folder: Path, name: str) -> Path | None:
    # CoNLL-2003 comes as eng.train, eng.testa and eng.testb.
    found = files_called(folder, [f"{stem}{ending}" for stem in _SPLITS[name] for ending in ENDINGS])
    found += [f for stem in _SPLITS[name] for f in sorted(folder.glob(f"*.{stem}"))]
    if len(found) > 1:
        raise DataError(f"{folder}: holds {' and '.join(f.name for f in found)}; keep one file for {name}")
    return found[0] if found else None


def read_sentences(path: Path, tagged: bool) -> list[Sentence]:
    """Return the sentences of a file in order.

    Args:
        path: JSON lines with `tokens` and `tags` (.jsonl), or one word a line, columns separated by blanks or tabs, the word first and the
            tag last, an empty line after a sentence; `-DOCSTART-` lines are left out.
        tagged: whether every word must have a tag; where not, a file may also have the words alone.

    Raises:
        DataError: naming file and line.
    """
    sentences = list(_json_sentences(path, tagged) if path.suffix.lower() == ".jsonl" else _conll_sentences(path, tagged))
    if not sentences:
        raise DataError(f"{path}: holds no sentence")
    return sentences


def _conll_sentences(path: Path, tagged: bool) -> Iterator[Sentence]:
    words: list[str] = []
    tags: list[str] = []
    count = columns = 0
    for number, line in enumerate([*read_text(path).split("\n"), ""], 1):
        cells = line.split("\t") if "\t" in line else line.split(" ")
        cells = [cell.strip() for cell in cells if cell.strip()]
        if not cells or cells[0] == DOCUMENT:
            if words:
                yield Sentence(str(count), tuple(words), tuple(tags) if tags else None)
                count += 1
            words, tags = [], []
            continue
        if path.suffix.lower() == ".conllu" and (_COMMENT.match(line) or len(cells) == _CONLL_U):
            raise DataError(f"{path}:{number}: is CoNLL-U, which numbers its words; take their forms and tags: {_AS_TWO_COLUMNS}")
        columns = columns or len(cells)
        if len(cells) != columns or (tagged and columns < 2):
            wanted = f"{columns} columns as in the lines before" if columns > 1 else "a word and its tag"
            raise DataError(f"{path}:{number}: {line.strip()[:60]!r} has {plural(len(cells), 'column')} where {wanted} belong")
        words.append(cells[0])
        if columns > 1:
            tags.append(cells[-1])


def _json_sentences(path: Path, tagged: bool) -> Iterator[Sentence]:
    seen: set[str] = set()
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: is not JSON: {error}") from None
        words, tags = (row.get("tokens"), row.get("tags")) if isinstance(row, dict) else (None, None)
        for name, values in (("tokens", words), ("tags", tags)):
            if (values is not None or name == "tokens" or tagged) and not (
                isinstance(values, list) and values and all(isinstance(value, str) and value.strip() for value in values)
            ):
                if isinstance(row, dict) and name not in row:
                    raise DataError(f"{path}:{number}: has no `{name}` (there are {', '.join(row)}), where a list of texts belongs")
                raise DataError(f"{path}:{number}: `{name}` is {json.dumps(values)[:60]}, where a list of texts belongs")
        assert isinstance(words, list)
        if not all(map(is_text, [*words, *(tags or [])])):
            raise DataError(f"{path}:{number}: a token or a tag {NO_TEXT}")
        if tags is not None and len(tags) != len(words):
            raise DataError(f"{path}:{number}: has {len(words)} tokens and {len(tags)} tags; every token has one")
        row_id = str(number - 1 if row.get("id") is None else row["id"])
        if row_id in seen:
            raise DataError(f"{path}:{number}: id {row_id!r} was used before")
        seen.add(row_id)
        yield Sentence(row_id, tuple(words), None if tags is None else tuple(tags))
