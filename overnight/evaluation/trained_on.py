"""Which documents of a text a run was trained on: scores on them say little of other text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from overnight.config import Data
from overnight.corpus.dedup import document_hash
from overnight.corpus.document_table import open_document_table
from overnight.corpus.readers import documents, start_reading
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import load_manifest
from overnight.corpus.text import clean_text


def trained_on(text: Data, data: Data, folder: Path) -> tuple[int, int]:
    """Return how many documents of a text are word for word in the training split of prepared data, and how many documents it has.

    Args:
        text: paths and formats of the text.
        data: as the data was prepared.
        folder: the prepared data; of one from before there was a table of documents none is found.

    Raises:
        DataError: the text cannot be read, or the folder is damaged.
    """
    manifest = load_manifest(folder)
    table = open_document_table(folder, manifest)
    read = documents(text, start_reading(text))
    hashes = [int.from_bytes(document_hash(sentences(clean_text(document.text, data)))[:8], "little") for document in read]
    found = np.zeros(len(hashes), bool)
    if table is not None:
        for entry in manifest.shards:
            if entry.split == "train":
                found |= np.isin(np.array(hashes, np.uint64), table.rows(entry).hashes)
    return int(found.sum()), len(hashes)
