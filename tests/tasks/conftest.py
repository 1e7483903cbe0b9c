"""What the tests of the tasks share: the folder of real data, and a small WordPiece tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers


@dataclass(frozen=True)
class Pieces:
    """The two fields of a vocabulary that encoding reads."""

    cls: int = 2
    sep: int = 3


@pytest.fixture(scope="session")
def data() -> Path:
    folder = Path(os.environ.get("OVERNIGHT_DATA") or Path(__file__).parents[2] / ".." / "shared" / "data")
    if not (folder / "INDEX.md").is_file():
        pytest.skip(f"the real data is not at {folder}; set OVERNIGHT_DATA")
    return folder


@pytest.fixture(scope="session")
def vocabulary() -> Pieces:
    return Pieces()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Every ASCII letter, digit and mark as a piece of its own, and a few words."""
    characters = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    words = ["the", "cat", "sat", "mat", "who", "where", "denver", "bronco"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *characters, *(f"##{c}" for c in characters)]
    result = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    result.normalizer = normalizers.BertNormalizer(lowercase=True)
    result.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return result
