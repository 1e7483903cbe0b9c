"""No tensor of a folder of others may have another shape than its network: none is cut, filled up or only refused when the model is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from overnight.errors import DataError
from overnight.interop.huggingface import load_pretrained
from tests.interop.peers import write_model

pytest.importorskip("transformers", reason="the extra `interop` is not installed")


@pytest.mark.parametrize("change", ["longer", "shorter", "wider"])
@pytest.mark.parametrize(
    "name", ["BertForPreTraining", "BertForSequenceClassification", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"]
)
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, name: str, change: str) -> None:
    write_model(tmp_path, name)
    weights = tmp_path / "model.safetensors"
    good = load_file(weights)
    load_pretrained(tmp_path)
    for key, tensor in good.items():
        other = {"longer": torch.cat([tensor, tensor[-1:]]), "shorter": tensor[:-1], "wider": tensor.repeat(*[1] * (tensor.ndim - 1), 2)}[
            change
        ]
        if key.startswith("classifier.weight") and change != "wider":
            continue  # it says how many classes there are
        save_file(good | {key: other.contiguous()}, weights, metadata={"format": "pt"})
        with pytest.raises(DataError, match=r"model\.safetensors: "):
            load_pretrained(tmp_path)
