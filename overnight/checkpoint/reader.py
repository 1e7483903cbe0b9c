"""Checkpoints: a folder of safetensors and one JSON file, complete or absent, never unpickled.

`checkpoints/step-0000100/` holds `model.safetensors`, `optimizer.safetensors`, for some models `carry.safetensors`, and `state.json`, which
has the counters and the checksums of all. Here they are read; :mod:`overnight.checkpoint.writer` writes them. The step in the name decides
which is newest, never a clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from overnight.distributed.wrap import distribute_like, full_tensor_cpu
from overnight.errors import DataError
from overnight.optim.offload import host_copy, moves, offloaded
from overnight.state_files import STRICT, digest_of, file_digest, parse_json

VERSION = 2


@dataclass
class TrainingProgress:
    """Where a run stands: with the weights and the moments, all that it takes to resume."""

    __pydantic_config__ = STRICT
    corpus: str = ""
    """Hash of the data that it was trained on; empty before the first step."""
    phase: str = ""
    optimizer: str = ""
    """Name of the phase's optimizer."""
    step: int = 0
    """Optimizer steps done in the phase."""
    global_step: int = 0
    """Optimizer steps done in all phases."""
    tokens: int = 0
    sequences: int = 0
    seconds: float = 0.0
    """Training time (s), over all resumes."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl at this moment; what follows is written again."""
    skipped: int = 0
    """Steps in all phases at which the optimizer was not stepped, because the gradient was not finite, or a spike."""
    batches_skipped: int = 0
    """Batches of the phase that were passed over when it was rolled back."""
    sequences_skipped: int = 0
    """Sequences of these batches: step t reads those that stand so many behind its own."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State of each part of the trainer, by name, as its `state_dict` gave it."""


@dataclass(frozen=True)
class _State:
    """`state.json`."""

    __pydantic_config__ = STRICT
    version: int
    progress: TrainingProgress
    checksums: dict[str, str]
    """XXH3-64 of each part's file and, as `progress`, of the counters."""


class CorruptCheckpoint(DataError):
    """A checkpoint that is not whole."""


def state_text(progress: Mapping[str, Any], checksums: Mapping[str, str]) -> str:
    """Return what `state.json` holds.

    Args:
        progress: the fields of :class:`TrainingProgress`.
        checksums: of the parts' files.
    """
    checksums = {**checksums, "progress": digest_of(progress)}
    return json.dumps({"version": VERSION, "progress": progress, "checksums": checksums}, indent=1)


def load_checkpoint(
    folder: Path, model: nn.Module, carry: dict[str, Tensor] | None = None
) -> tuple[TrainingProgress, dict[str, Tensor], list[str]] | None:
    """Fill the model from the newest whole checkpoint.

    Args:
        folder: the run's `checkpoints`.
        model: of the same recipe; its parameters are overwritten. They may be sharded already.
        carry: filled with the carried state; left empty where the checkpoint has none.

    Returns:
        None where there is no checkpoint; else the counters, the optimizer's tensors (for :func:`restore_optimizer`) and a
        sentence for every newer checkpoint that had to be passed over.

    Raises:
        DataError: when there are checkpoints and none is whole, or the newest whole one is of another model or of a newer program.
    """
    problems: list[str] = []
    for checkpoint in list_checkpoints(folder):
        try:
            progress, parts = _contents(checkpoint)
        except CorruptCheckpoint as error:
            problems.append(str(error))
            continue
        fill(model, parts["model"], checkpoint)
        if carry is not None:
            carry.update(parts.get("carry", {}))
        return progress, parts["optimizer"], problems
    if problems:
        raise DataError("no checkpoint is whole:\n" + "\n".join(problems) + f"\nDelete {folder} to begin again")
    return None


def read_checkpoint(checkpoint: Path) -> tuple[TrainingProgress, dict[str, Tensor], dict[str, Tensor]]:
    """Return one checkpoint: counters, the model's tensors, the optimizer's tensors.

    Raises:
        CorruptCheckpoint: when a file is missing, cut short or changed.
        DataError: when it is of another format version.
    """
    try:
        progress, parts = _contents(checkpoint)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"{error}; put it back, or delete {checkpoint}, and the checkpoint before it is used") from None
    return progress, parts["model"], parts["optimizer"]


def _contents(checkpoint: Path) -> tuple[TrainingProgress, dict[str, dict[str, Tensor]]]:
    """Return counters, and the tensors of every part."""
    try:
        state = _read_state(checkpoint / "state.json")
        if missing := {"model", "optimizer", "progress"} - state.checksums.keys():
            raise CorruptCheckpoint(f"{checkpoint / 'state.json'} has no checksum of {' and '.join(sorted(missing))}")
        return state.progress, {
            part: read_tensors(checkpoint / f"{part}.safetensors", digest) for part, digest in state.checksums.items() if part != "progress"
        }
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{checkpoint} is incomplete: {error.filename} is missing") from None
    except NotADirectoryError:
        raise CorruptCheckpoint(f"{checkpoint} is not a folder; move it away") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{checkpoint} cannot be read: {error}") from None


def model_digest(checkpoint: Path) -> str:
    """Return the checksum of a checkpoint's weights, as it was written, which tells it from another of the same step.

    Raises:
        DataError: when `state.json` cannot be read, or does not say it.
    """
    try:
        return _read_state(checkpoint / "state.json").checksums["model"]
    except (KeyError, OSError) as error:
        raise CorruptCheckpoint(f"{checkpoint / 'state.json'} has no checksum of model: {error}") from None


def read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    """Read a file of tensors.

    Args:
        path: a safetensors file.
        digest: of :func:`overnight.state_files.file_digest`.

    Raises:
        FileNotFoundError: when there is none.
        CorruptCheckpoint: when it has another checksum, or cannot be read.
    """
    try:
        if file_digest(path) != digest:
            raise CorruptCheckpoint(f"{path} was cut short or changed: its checksum differs")
        return load_file(path)
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from None


def _read_state(path: Path) -> _State:
    from pydantic import TypeAdapter, ValidationError

    content = path.read_bytes()
    try:
        tree = parse_json(content.decode())
    except ValueError as error:
        raise CorruptCheckpoint(f"{path} is not JSON: {error}") from None
    version = tree.get("version") if isinstance(tree, dict) else None
    if not isinstance(version, int):
        raise CorruptCheckpoint(f"{path} was changed: it has no version")
    if version != VERSION:
        raise DataError(
            f"{path.parent} has format version {version}, but this program reads {VERSION}; continue with the version of overnight that wrote it"
        )
    digests = tree.get("checksums")
    if isinstance(digests, dict) and "progress" in digests and digests["progress"] != digest_of(tree.get("progress")):
        raise CorruptCheckpoint(f"{path} was changed: the checksum of its counters differs")
    try:
        return TypeAdapter(_State).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "unexpected_keyword_argument":
            raise DataError(
                f"{path} has {where}, which this program does not know; continue with the version of overnight that wrote it"
            ) from None
        raise CorruptCheckpoint(f"{path}: {where}: {first['msg']}") from None


def fill(model: nn.Module, tensors: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Overwrite the model's tensors; nothing is when one does not fit.

    Raises:
        DataError: naming the place that the tensors are from, and what does not fit.
    """
    own = model.state_dict()
    wrong = [
        f"{name}: {_kind(tensors.get(name))} there, {_kind(own.get(name))} here"
        for name in {**own, **tensors}
        if _kind(tensors.get(name)) != _kind(own.get(name))
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise DataError(f"{checkpoint} belongs to another model: {'; '.join(wrong[:3])}{more}")
    model.load_state_dict({name: distribute_like(own[name], t) if hasattr(own[name], "placements") else t for name, t in tensors.items()})


def assert_masked_lm(tensors: Mapping[str, Tensor], run_dir: Path) -> None:
    """Check that weights have a masked-LM head, which those of an imported encoder may lack.

    Raises:
        DataError: when they have none.
    """
    if "mlm.bias" not in tensors:
        raise DataError(f"{run_dir}: has no masked-LM head, so it cannot fill in [MASK]; name a pretrained model that has one")


def _kind(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint's folder, by name, or None."""
    return next((checkpoint for checkpoint in list_checkpoints(folder) if checkpoint.is_dir()), None)


def checkpoint_name(step: int) -> str:
    """Return the folder of the checkpoint of a step, counted over all phases."""
    return f"step-{step:07d}"


def step_of(checkpoint: Path) -> int | None:
    """Return the step that a name is of; None where it is no checkpoint's."""
    found = re.fullmatch(r"step-(\d{7,})(\.old)?", checkpoint.name)
    return int(found[1]) if found else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return what lies in the folder under the names of checkpoints, newest first.

    A name with `.old` is of one that was being replaced by another of its step.
    """
    found = [
        (step, checkpoint.suffix == "", checkpoint) for checkpoint in folder.glob("step-*") if (step := step_of(checkpoint)) is not None
    ]
    return [checkpoint for _, _, checkpoint in sorted(found, reverse=True)]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as `parameter name/entry` → whole tensor; its parameters must have been given with their names."""
    return {name: full_tensor_cpu(tensor) for name, tensor in optimizer_entries(optimizer).items()}


def optimizer_entries(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state as :func:`optimizer_tensors` does, with the tensors as they lie: on the device, and sharded where the parameters are."""
    return {
        f"{name}/{entry}": torch.as_tensor(value)
        for group in optimizer.param_groups
        for name, p in zip(group["param_names"], group["params"], strict=True)
        for entry, value in optimizer.state[p].items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], restart_count: bool = False) -> None:
    """Put saved state into a fresh optimizer over the same parameters, in the types it was saved in.

    `Optimizer.load_state_dict` is not used because it casts moments to the parameter's type.

    Args:
        tensors: from :func:`optimizer_tensors`; a parameter that never had a gradient has none.
        restart_count: set the step counts back to 0, keeping the moments, as NVLAMB does between phases.

    Raises:
        DataError: when it is of parameters that the optimizer does not have, or of other shapes; the optimizer is as it was.
    """
    owned = {name: p for group in optimizer.param_groups for name, p in zip(group["param_names"], group["params"], strict=True)}
    # Never through the device: it may have no room for all of it.
    on_host = {name for group in optimizer.param_groups if offloaded(group) for name in group["param_names"]}
    states: dict[str, dict[str, Any]] = {name: {} for name in owned}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        if name not in owned:
            raise DataError(f"the optimizer's state {key} is of a parameter that this network does not have")
        # A count is one number; whatever else is kept is kept for each element.
        if value.ndim and value.shape != owned[name].shape:
            raise DataError(f"the optimizer's state {key} is of shape {tuple(value.shape)}, the parameter of {tuple(owned[name].shape)}")
        states[name][entry] = torch.zeros_like(value) if entry == "step" and restart_count else value
    for name, p in owned.items():
        optimizer.state[p] = {
            entry: host_copy(value, p.device) if name in on_host and moves(value) else distribute_like(p, value)
            for entry, value in states[name].items()
        }
