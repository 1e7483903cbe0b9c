"""Files of texts to embeddings, as JSON lines or as .npy, in the order of the texts; some thousand of them are held at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from overnight.display import json_line
from overnight.errors import ConfigError
from overnight.inference.embedding import Vectors, embed_texts
from overnight.inference.model import Model
from overnight.run_dir.atomic import whole_file, write_whole
from overnight.tasks.inputs import answered, read_input
from overnight.tasks.line_fields import example_of

_TABLES = (".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class Embedded:
    """A text that was embedded, or a line that could not be."""

    id: str
    """Of the line, or its number in its file: of a line from 1, of a row of a table from 0."""
    file: str
    vector: Vectors | None
    error: str = ""


def embed_files(model: Model, files: Sequence[str], pooling: str, layer: int, normalize: bool) -> Iterator[Embedded]:
    """Embed the texts of files, in order.

    Args:
        model: any trained encoder.
        files: lines of text or of JSON (`text`, `id`), also .jsonl; .csv, .tsv and .parquet with a column `text`; `-` is standard input. An empty
            line or cell is an empty text, and what would be a pair elsewhere (a tab, `text_b`) is one text.
        pooling, layer, normalize: as of :meth:`overnight.inference.model.Model.embed`.

    Raises:
        DataError: a file cannot be read, or a table has no text; a line or row that is wrong is only reported as such.
    """

    def read(number: int, fields: dict[str, Any]) -> tuple[str, str]:
        example = example_of(number, fields)
        return example.id, example.text_a if example.text_b is None else f"{example.text_a}\t{example.text_b}"

    for file in files:

        def embed(rows: list[tuple[str, str]], file: str = file) -> Iterator[Embedded]:
            vectors = embed_texts(model.trained, [text for _, text in rows], pooling, layer, normalize)
            return (Embedded(row_id, file, vector) for (row_id, _), vector in zip(rows, vectors, strict=True))

        given = read_input(file, {"task": "csv"}, "" if Path(file).suffix.lower() in _TABLES else "lines", empty=True)
        for found in answered(given, read, embed, keep_going=True, empty=True, pairs=False):
            yield found if isinstance(found, Embedded) else Embedded(found["id"], file, None, found["error"])


def write_embeddings(found: Iterable[Embedded], to: Path | None, width: int, several: bool) -> tuple[int, int]:
    """Write embeddings: a .npy is float32 (n, width), anything else JSON lines with `id`, `embedding` and, of several files, `file`.

    A line that could not be embedded is a row of NaN, or an object with `error`; where the rest goes to a file it is also said on standard error.

    Args:
        found: of :func:`embed_files`.
        to: the file, which appears whole or not at all; None prints JSON lines.
        width: of a vector.
        several: whether they are of several files.

    Returns:
        how many texts there were, and how many of them could not be embedded.

    Raises:
        OSError: as the system says it (a full disk).
    """
    count = broken = 0

    def counted() -> Iterator[Embedded]:
        nonlocal count, broken
        for one in found:
            count, broken = count + 1, broken + bool(one.error)
            if one.error and to is not None:
                print(f"{one.file}: {one.error}", file=sys.stderr)
            yield one

    if to is None:
        for one in counted():
            print(json_line(_fields(one, several), sys.stdout), flush=True)
    elif to.suffix == ".npy":
        _write_npy(to, counted(), width)
    else:
        write_whole(to, (f"{json.dumps(_fields(one, several), ensure_ascii=False)}\n".encode() for one in counted()))
    return count, broken


def check_output(to: str | None) -> Path | None:
    """Return the file to write.

    Raises:
        ConfigError: it is a folder, or of an ending that promises something else.
    """
    if to is None:
        return None
    path = Path(to)
    if path.is_dir() or path.suffix not in (".npy", ".jsonl", ".json"):
        raise ConfigError(
            f"--to = {to}: {'is a folder' if path.is_dir() else 'is neither .npy nor .jsonl'}; name a file, such as vectors.npy"
        )
    return path


def _fields(one: Embedded, several: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": one.id} | ({"file": one.file} if several else {})
    # The shortest decimals that are the same float32.
    return fields | ({"error": one.error} if one.vector is None else {"embedding": [float(str(value)) for value in one.vector]})


def _write_npy(path: Path, found: Iterable[Embedded], width: int) -> None:
    """Write rows behind a header that says how many there are, which is known at the end: numpy leaves room in it for any number."""

    def header(rows: int) -> None:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, width)})

    with whole_file(path) as file:
        header(0)
        begin, rows = file.tell(), 0
        for one in found:
            vector = np.full(width, np.nan, "<f4") if one.vector is None else one.vector.astype("<f4")
            file.write(vector.tobytes())
            rows += 1
        file.seek(0)
        header(rows)
        assert file.tell() == begin
