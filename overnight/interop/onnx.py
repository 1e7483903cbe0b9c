"""An exported folder in the ONNX format too, for programs without PyTorch; what onnxruntime computes is compared before it counts."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from overnight.errors import ConfigError, DataError
from overnight.state_files import read_mapping

TOLERANCE = 1e-5
_NEEDED = ("onnx", "onnxruntime", "onnxscript")
# Longest sequences and largest batches that the graph is made for; the network's own positions bound the first, too.
_LARGEST_BATCH = 65_536


class _Logits(nn.Module):
    """A model of transformers as a function of tensors in order to its logits in order."""

    def __init__(self, model: Any, inputs: list[str]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        found = self.model(**dict(zip(self.inputs, given, strict=True)), return_dict=True)
        return tuple(value for name, value in found.items() if name.endswith("logits"))


def check_onnx() -> None:
    """Check that what an export to ONNX needs is installed.

    Raises:
        ConfigError: naming the extra.
    """
    import importlib.util

    missing = [name for name in (*_NEEDED, "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--format = onnx: needs {', '.join(missing)}: pip install 'overnight[onnx]'")


def write_onnx(folder: Path) -> None:
    """Write `model.onnx` into a folder of :func:`overnight.interop.huggingface.export`: inputs and logits by the names of transformers, of any batch and length.

    Raises:
        DataError: onnxruntime computes something else than PyTorch, by more than 1e-5.
    """
    config = read_mapping(folder / "config.json", "export again")
    model = _load(folder, config["architectures"][0])
    longest = int(config["max_position_embeddings"])
    inputs = _sample(config, 2, min(9, longest))
    wrapped, names = _Logits(model, list(inputs)), _output_names(model, inputs)
    batch = torch.export.Dim("batch", min=1, max=_LARGEST_BATCH)
    sequence = torch.export.Dim("sequence", min=2, max=longest)
    path = folder / "model.onnx"
    # It prints its steps, and warns of what it deprecates in itself.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            wrapped,
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=names,
            dynamo=True,
            dynamic_shapes={"given": tuple({0: batch, 1: sequence} for _ in inputs)},
            external_data=False,
            verbose=False,
        )
    _compare(path, wrapped, config, longest)


def _load(folder: Path, architecture: str) -> Any:
    """Return the model as transformers has it, without what its libraries say of themselves."""
    for name in ("torchao", "torch.utils._pytree", "torch.onnx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import transformers

    transformers.logging.disable_progress_bar()
    try:
        # Eager: the kernels of attention cannot be traced.
        found = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager", local_files_only=True)
    finally:
        transformers.logging.enable_progress_bar()
    return found.eval()


def _sample(config: dict[str, Any], sequences: int, tokens: int) -> dict[str, Tensor]:
    """Return inputs of sequences of which the last one is shorter."""
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, config["vocab_size"], (sequences, tokens), generator=random)
    mask = torch.ones_like(ids)
    mask[-1, tokens - tokens // 3 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if config["model_type"] == "bert":
        inputs["token_type_ids"] = (torch.arange(tokens) > tokens // 2).long().expand(sequences, -1).contiguous()
    return inputs


def _output_names(model: Any, inputs: dict[str, Tensor]) -> list[str]:
    with torch.no_grad():
        return [name for name in model(**inputs, return_dict=True) if name.endswith("logits")]


def _compare(path: Path, model: nn.Module, config: dict[str, Any], longest: int) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    for sequences, tokens in ((1, min(5, longest)), (3, min(64, longest))):
        inputs = _sample(config, sequences, tokens)
        found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        with torch.no_grad():
            expected = model(*inputs.values())
        for ours, theirs in zip(found, expected, strict=True):
            apart = float(np.abs(ours - theirs.numpy()).max() / max(1.0, float(theirs.abs().max())))
            if not apart <= TOLERANCE:
                raise DataError(
                    f"{path.name}: onnxruntime's outputs differ from PyTorch's ({apart:.1e} apart, {TOLERANCE:.0e} allowed); "
                    "use the folder without it, and other versions of torch and onnxruntime"
                )
