"""What the tests of the sources share: the documents of files, and what was counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overnight.config import Data
from overnight.corpus.document import Document, Source
from overnight.corpus.readers import documents, start_reading


def read(*paths: Path | str, **settings: Any) -> tuple[list[Document], Source]:
    """All documents of some paths, and what was counted of the first."""
    data = Data(paths=[str(path) for path in paths], **settings)
    reading = start_reading(data)
    return list(documents(data, reading)), reading.sources[0]


def texts(*paths: Path | str, **settings: Any) -> list[str]:
    """The texts of all documents of some paths."""
    return [document.text for document in read(*paths, **settings)[0]]
