"""Data sets of Hugging Face through their own library, as streams: `hf:NAME[@REVISION][:CONFIG[:SPLIT]]`."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable, Iterator
from typing import Any

from overnight.config import Data, environment_text
from overnight.corpus.document import Document, Input, Reading, Source
from overnight.corpus.rows import check_columns, document_of, wanted_columns
from overnight.errors import ConfigError, DataError

PREFIX = "hf:"
_FORM = re.compile(r"hf:(?P<name>[^:@]+)(?:@(?P<revision>[^:]+))?(?::(?P<config>[^:]*))?(?::(?P<split>[^:]+))?")

_PART = re.compile(r"(hf:.+:\w+)\[[^]]*\]")


def version(path: str) -> str:
    """Return what changes when the data set does: of the hub its revision, of a local folder its files.

    Raises:
        ConfigError: when the path is none of a data set, or names an environment variable that is not set.
        DataError: when there is no such data set, or the extra `datasets` is not installed.
    """
    return str(_builder(path).hash)


def read_dataset(path: str, data: Data, source: Source, reading: Reading) -> Iterator[Document]:
    """Yield the text of each row of a data set, with its label and group, streamed: of `train` where no split is named.

    Raises:
        DataError: when it has no such split or column, or cannot be reached.
    """
    found = Input(path, data, source, reading)
    split = _parts(path)["split"] or "train"
    rows = _tried(path, lambda: _builder(path).as_streaming_dataset(split=split))
    columns = rows.column_names or list(_tried(path, lambda: next(iter(rows), {})))
    check_columns(found, columns)
    # Other columns may be pictures, which would be unpacked.
    rows = iter(rows.select_columns([name for name in columns if name in wanted_columns(data)]))
    source.files += 1
    number = 0
    while (row := _tried(path, lambda: next(rows, None))) is not None:
        number += 1
        yield from (document._replace(name=f"{path}#{number}") for document in document_of(found, number, row))


@functools.lru_cache(maxsize=8)
def _builder(path: str) -> Any:
    parts = _parts(path)
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{path}: data sets of Hugging Face need the extra `datasets` (pip install 'overnight[datasets]')")
    import datasets

    datasets.disable_progress_bars()
    return _tried(path, lambda: datasets.load_dataset_builder(parts["name"], parts["config"] or None, revision=parts["revision"]))


def _parts(path: str) -> dict[str, str | None]:
    if part := _PART.fullmatch(path):
        raise ConfigError(
            f"data.paths: {path!r} names a part of a split, but a split is read as one stream; name {part[1]!r}, or write the part into a file "
            "of its own (to_parquet of datasets) and name that"
        )
    if not (found := _FORM.fullmatch(environment_text(path, "data.paths"))):
        raise ConfigError(
            f"data.paths: {path!r} is not a Hugging Face data set; write hf:NAME, hf:NAME:CONFIG, hf:NAME:CONFIG:SPLIT or hf:NAME@REVISION..."
        )
    return found.groupdict()


def _tried(path: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # the library passes on those of every format and connection
        said = (str(error) or type(error).__name__).strip().splitlines()[0][:300]
        raise DataError(
            f"{path}: cannot be read ({said}); correct data.paths, repair the data set, or make sure that this machine can reach it"
        ) from None
