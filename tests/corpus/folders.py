"""Small prepared folders for the tests of what reads them."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overnight.config import Data
from overnight.corpus.dedup import document_hash, valid_mask
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import load_manifest, save_manifest

WORDS = ["".join(random.Random(seed).choices("abcdeghilnorstu", k=random.Random(seed).randint(2, 9))) for seed in range(300)]


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of several sentences, no two alike."""
    rng = random.Random(seed)
    return [
        " ".join(" ".join(rng.choices(WORDS, k=rng.randint(4, 14))).capitalize() + "." for _ in range(rng.randint(5, 30)))
        for _ in range(count)
    ]


def prepared_folder(place: Path, sources: Mapping[str, list[str]], /, shard_tokens: int = 2000, **settings: Any) -> Path:
    """Prepare JSON lines, a file for each source, with a vocabulary of 300 and a fifth for validation; returns `place/data`."""
    place.mkdir(parents=True, exist_ok=True)
    for name, rows in sources.items():
        (place / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
    data = Data(paths=[str(place / name) for name in sources], vocab_size=300, valid_fraction=0.2, workers=1)
    prepare(dataclasses.replace(data, **settings), place / "data", lambda line: None, shard_tokens)
    return place / "data"


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def is_valid(sentences: list[str]) -> bool:
    """Return whether a document is of the fifth for validation."""
    return bool(valid_mask(np.frombuffer(document_hash(sentences), np.uint8)[None], 0.2)[0])


def as_of_old(folder: Path) -> Path:
    """Make a folder what it was before the table of documents; returns it."""
    save_manifest(folder, dataclasses.replace(load_manifest(folder), documents_checksum=""))
    (folder / "documents.arrow").unlink()
    return folder


def unreadable(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the system refuse to list the folders of a name, as it does for all users but root."""
    scandir = os.scandir

    def refused(path: Any = ".") -> Any:
        if os.path.basename(os.path.normpath(os.fspath(path))) == name:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
