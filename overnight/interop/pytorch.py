"""Files of PyTorch (`torch.save`) with the tensors of a BERT: `pytorch_model.bin`, and the checkpoints of NVIDIA's DeepLearningExamples.

They are pickles, and are read with `weights_only`, which makes tensors and plain containers and refuses all else.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from overnight.errors import DataError

# What NVIDIA's, and a module in DistributedDataParallel, put in front of the names of `BertForPreTraining`.
_PREFIXES = ("module.", "bert_model.")
# Their dense layers with an activation inside have a name of their own.
_ACTIVATED = ".dense_act."
# What torch says that a pickle would make.
_ASKS_FOR = re.compile(r"GLOBAL ([\w.]+\w)")
# Under these a checkpoint of a training has its network.
_MODEL = ("model", "state_dict")


def read_torch(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a network from a file of `torch.save`, by the names of transformers.

    Raises:
        DataError: it cannot be read, holds objects that only unpickling makes, or no tensors by name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles of another protocol, which are then refused
            tree = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"{path}: does not exist") from None
    except Exception as error:  # above all UnpicklingError, which cannot be named without its module
        raise DataError(
            f"{path}: is cut short, no file of PyTorch, or a pickle of more than tensors, which can run code when it is read ({_why(error)}). Open it where you trust it, "
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


def _why(error: Exception) -> str:
    """Return what torch says is in the way, without its advice to read the file without this protection."""
    said = str(error).strip() or type(error).__name__
    if asked := _ASKS_FOR.search(said):
        return f"it asks for {asked[1]}"
    return "it does more than tensors need" if said.startswith("Weights only") else re.split(r"\.\s", said)[0]


def _name(name: str) -> str:
    while prefix := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name.replace(_ACTIVATED, ".dense.")
