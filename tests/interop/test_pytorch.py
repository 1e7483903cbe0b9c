"""Files of torch.save are read for their tensors alone, and what is refused is said without advice to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from overnight.errors import DataError
from overnight.interop.pytorch import read_torch
from overnight.interop.sources import read_source
from tests.interop.peers import write_model

pytest.importorskip("transformers")


class _Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["hf/pytorch_model.bin", "nvidia/ckpt_1.pt"])
def test_a_pickle_is_refused_and_not_run(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    write_model(file.parent)
    (file.parent / "model.safetensors").unlink()
    if "nvidia" in name:
        (file.parent / "config.json").rename(file.parent / "bert_config.json")
    torch.save({"model": {"a": torch.zeros(1)}, "data_loader": _Planted(tmp_path / "ran")}, file)
    with pytest.raises(
        DataError,
        match=r"pickle of more than tensors, which can run code when it is read \(it asks for [\w.]+\)\. Open it where you trust it, and save its tensors alone",
    ):
        read_source(str(file.parent))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "EOFError"),
        (b"no file of torch", "it does more than tensors need"),
        (b"cut", "PytorchStreamReader failed reading zip archive: failed finding central directory"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_in_few_words(content: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(content)
    if content == b"cut":
        torch.save({"a": torch.zeros(1000)}, file)
        file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(DataError) as refused:
        read_torch(file)
    assert f"when it is read ({why}). Open it where you trust it" in str(refused.value)
    assert "weights_only` set to" not in str(refused.value)
