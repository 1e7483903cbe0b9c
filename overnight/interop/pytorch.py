"""Files of PyTorch (`torch.save`) with the tensors of a BERT: `pytorch_model.bin`, and the checkpoints of NVIDIA's DeepLearningExamples.

They are pickles, and are read with `weights_only`, which makes tensors and plain containers and refuses all else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from overnight.errors import DataError

# What NVIDIA's, and a module in DistributedDataParallel, put in front of the names of `BertForPreTraining`.
_PREFIXES = ("module.", "bert_model.")
# Their dense layers with an activation inside have a name of their own.
_ACTIVATED = ".dense_act."
# Under these a checkpoint of a training has its network.
_MODEL = ("model", "state_dict")


def read_torch(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a network from a file of `torch.save`, by the names of transformers.

    Raises:
        DataError: it cannot be read, holds objects that only unpickling makes, or no tensors by name.
    """
    try:
        tree = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"{path}: does not exist") from None
    except Exception as error:  # above all UnpicklingError, which cannot be named without its module
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{path}: is cut short, or a pickle of more than tensors, which can run code when it is read ({why}). Open it where you trust it, "
            "and save its tensors alone: torch.save(torch.load(FILE, weights_only=False)['model'], 'weights.pt')"
        ) from None
    for name in _MODEL:
        if isinstance(tree, dict) and isinstance(tree.get(name), Mapping):
            tree = tree[name]
            break
    if not isinstance(tree, Mapping):
        raise DataError(f"{path}: holds a {type(tree).__name__}, not the tensors of a network by name")
    found = {_name(str(name)): tensor for name, tensor in tree.items() if isinstance(tensor, Tensor)}
    if not found:
        raise DataError(f"{path}: has no tensors; name the checkpoint of a BERT")
    return found


def _name(name: str) -> str:
    while prefix := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name.replace(_ACTIVATED, ".dense.")
