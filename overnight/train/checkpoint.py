"""Checkpoints: a folder of safetensors and one JSON file, complete or absent, never unpickled.

`checkpoints/step-0000100/` holds `model.safetensors`, `optimizer.safetensors` and `state.json`, which carries the counters and
the checksums of the other two. It is written beside its place, synced and renamed; `latest` names the newest.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from overnight.errors import DataError
from overnight.train.parallel import World, cut_like, gathered, together

VERSION = 1


@dataclass
class Progress:
    """The counters of a run: with the weights and the moments, all that it takes to go on."""

    corpus: str = ""
    """Hash of the shards that it was trained on."""
    phase: str = ""
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
    running: dict[str, list[float]] = field(default_factory=dict)
    """Sum and count of each loss since the last line of metrics."""
    loss_scale: float = 0.0
    """Of fp16; 0 before the first step and in other precisions."""
    clean_steps: int = 0
    """Steps since the loss scale last changed: with it the state of :class:`overnight.train.precision.LossScale`."""
    skipped: int = 0
    """Steps in all phases at which the optimizer was not stepped, because the gradient was not finite."""
    noise: dict[str, list[float]] = field(default_factory=dict)
    """Averages of the gradient noise scale of the phase, by parameter group: the state of :class:`overnight.optim.noise.NoiseScale`."""


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, keep: int, world: World | None = None
) -> Path:
    """Write a checkpoint and forget the oldest. It holds whole tensors, whatever the number of processes: the first one writes, all call.

    Args:
        folder: the run's `checkpoints`.
        progress: counters.
        keep: how many to leave.
        world: the processes that hold the model; None for this one.

    Raises:
        DataError: when it cannot be written, in every process; those before it are untouched.
    """
    world = world or World()
    name = f"step-{progress.global_step:07d}"
    tensors = {"model": _named(model), "optimizer": optimizer_tensors(optimizer)}
    with together(world):
        if world.main:
            _save(folder, name, tensors, progress)
            for old in _newest_first(folder)[keep:]:
                shutil.rmtree(old, ignore_errors=True)
    return folder / name


def _save(folder: Path, name: str, tensors: dict[str, dict[str, Tensor]], progress: Progress) -> None:
    beside, place = folder / f".{name}.tmp", folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover)
        beside.mkdir()
        checksums = {}
        for part, named in tensors.items():
            save_file(named, beside / f"{part}.safetensors")
            checksums[part] = _sync_and_hash(beside / f"{part}.safetensors")
        _write(beside / "state.json", json.dumps({"version": VERSION, "progress": asdict(progress), "checksums": checksums}, indent=1))
        _sync(beside)
        if place.exists():  # Made before a fall-back to an older one, or found damaged.
            shutil.rmtree(place)
        beside.rename(place)
        _sync(folder)
        _write(folder / ".latest.tmp", name)
        (folder / ".latest.tmp").rename(folder / "latest")
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        full = isinstance(error, SafetensorError) or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = f"{shutil.disk_usage(folder.parent).free / 1e6:,.0f} MB are free there; make room" if full else "mend the folder"
        raise DataError(
            f"checkpoint {place} could not be written: {error}. The checkpoints before it are whole; {hint} and run again"
        ) from error


def load(folder: Path, model: nn.Module) -> tuple[Progress, dict[str, Tensor], list[str]] | None:
    """Fill the model from the newest whole checkpoint.

    Args:
        folder: the run's `checkpoints`.
        model: of the same recipe; its parameters are overwritten.

    Returns:
        None where there is no checkpoint; else the counters, the optimizer's tensors (for :func:`restore_optimizer`) and a
        sentence for every newer checkpoint that had to be passed over.

    Raises:
        DataError: when there are checkpoints and none is whole.
    """
    problems: list[str] = []
    for place in _newest_first(folder):
        try:
            progress, model_tensors, optimizer_state = read(place)
            model.load_state_dict(model_tensors, strict=True)
            return progress, optimizer_state, problems
        except DataError as error:
            problems.append(str(error))
        except RuntimeError as error:
            raise DataError(f"{place} belongs to another model: {str(error).splitlines()[-1].strip()}") from None
    if problems:
        raise DataError("no checkpoint is whole:\n" + "\n".join(problems) + f"\nDelete {folder} to begin again")
    return None


def read(place: Path) -> tuple[Progress, dict[str, Tensor], dict[str, Tensor]]:
    """One checkpoint: counters, the model's tensors, the optimizer's tensors.

    Raises:
        DataError: when a file is missing, cut short or changed, or of another format version.
    """
    try:
        state = json.loads((place / "state.json").read_text(encoding="utf-8"))
        if state["version"] != VERSION:
            raise DataError(f"{place} has format version {state['version']}, this program reads {VERSION}")
        parts = []
        for part in ("model", "optimizer"):
            path = place / f"{part}.safetensors"
            if _hash(path) != state["checksums"][part]:
                raise DataError(f"{path} was cut short or changed: its checksum differs")
            parts.append(load_file(path))
        return Progress(**state["progress"]), parts[0], parts[1]
    except FileNotFoundError as error:
        raise DataError(f"{place} is incomplete: {error.filename} is missing") from None
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DataError(f"{place} cannot be read: {error}") from None


def newest(folder: Path) -> Path | None:
    """The newest checkpoint's folder, by name, or None."""
    return next(iter(_newest_first(folder)), None)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `parameter name/entry` → whole tensor; its parameters must have been given with their names."""
    named = {}
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            for entry, value in optimizer.state[p].items():
                named[f"{name}/{entry}"] = gathered(torch.as_tensor(value))
    return named


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], restart_count: bool = False) -> None:
    """Put saved state into a fresh optimizer over the same parameters, in the types it was saved in.

    `Optimizer.load_state_dict` is not used because it casts moments to the parameter's type.

    Args:
        tensors: from :func:`optimizer_tensors`.
        restart_count: set the step counts back to 0, keeping the moments, as NVLAMB does between phases.
    """
    for group in optimizer.param_groups:
        for name, p in zip(group["param_names"], group["params"], strict=True):
            state: dict[str, Any] = {}
            for key, value in tensors.items():
                owner, _, entry = key.rpartition("/")
                if owner != name:
                    continue
                if entry == "step" and restart_count:
                    value = torch.zeros_like(value)
                state[entry] = cut_like(p, value)
            optimizer.state[p] = state


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {name: gathered(tensor) for name, tensor in model.state_dict().items()}


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True) if folder.is_dir() else []


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_and_hash(path: Path) -> str:
    _sync(path)
    return _hash(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)
