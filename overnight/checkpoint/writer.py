"""Writing checkpoints: while the training continues, read back before they count, and never a moment without a good one.

A checkpoint is written under a name that nobody reads (`.step-0000100.tmp`), synced, read back from the disk, and renamed. Only then are older
ones removed, so that whatever fails, and wherever, the newest whole one stays. The format is :mod:`overnight.checkpoint.reader`'s.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from overnight.checkpoint.reader import (
    TrainingProgress,
    checkpoint_name,
    list_checkpoints,
    newest_checkpoint,
    optimizer_entries,
    state_text,
    step_of,
)
from overnight.distributed.collectives import raise_on_all_ranks
from overnight.distributed.world import World
from overnight.errors import DataError
from overnight.run_dir.atomic import FULL, how_to_make_room, sync
from overnight.state_files import file_digest

Parts = dict[str, dict[str, Tensor]]
"""The tensors of a checkpoint by part (`model`, `optimizer`, `carry`) and name."""

# Bytes of a checkpoint that are not tensors: the names in three headers, the counters.
_BESIDE_TENSORS = 1 << 18


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time. Leave its `with` block, and the last one is whole.

    Args:
        folder: the run's `checkpoints`.
        keep: how many of the newest to leave.
        keep_every: steps, of all phases, of which one checkpoint is left for ever: the first. 0: none.
        asynchronous: the training stands still only while the tensors are copied to the host; a thread does the rest.
        world: the processes that hold the model. The first one writes, all call. None for this one.
        keep_before: returns a step of all phases, of which, or of before which, the newest is left, too: from there a run continues that is given more time. None where
            there is none yet.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        keep_every: int = 0,
        asynchronous: bool = True,
        world: World | None = None,
        keep_before: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.folder, self._keep, self._keep_every, self._keep_before = folder, keep, keep_every, keep_before
        self._asynchronous, self._world = asynchronous, world or World()
        self._thread: threading.Thread | None = None
        self._copies: Parts = {}
        self.error: BaseException | None = None
        """Why the last one could not be written; raised by the next :meth:`wait`."""

    def save(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: TrainingProgress, carry: Mapping[str, Tensor] | None = None
    ) -> float:
        """Take a checkpoint of this moment. It holds whole tensors, whatever the number of processes.

        Args:
            carry: the state that a recurrent network carries from step to step; whole, on the first process.

        Returns:
            seconds that the training stood still.

        Raises:
            DataError: when the one before could not be written, or this one and it is waited for, in every process; older ones are untouched.
        """
        start = time.perf_counter()
        self.wait()
        lying: dict[str, Mapping[str, Tensor]] = {"model": model.state_dict(), "optimizer": optimizer_entries(optimizer)}
        parts = self._on_host(lying | ({"carry": carry} if carry else {}))
        if self._world.main:
            # A daemon: whoever presses Ctrl-C again while this is waited for does not want to wait.
            self._thread = threading.Thread(target=self._write_in_thread, args=(parts, asdict(progress)), daemon=True)
            self._thread.start()
        if not self._asynchronous:
            self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the last one is whole; every process calls.

        Raises:
            DataError: when it could not be written, in every process.
        """
        with raise_on_all_ranks(self._world):
            self.settle()
            error, self.error = self.error, None
            if error is not None:
                raise error

    def settle(self) -> None:
        """Wait until the last one is whole or has failed, in this process; `error` then says why."""
        if self._thread is not None:
            self._thread.join()

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif not isinstance(error, KeyboardInterrupt):
            self.settle()
            if isinstance(error, OSError) and self.error is not None:
                raise self.error from error  # A disk that is full fails both, and this one says what to do.
            if self.error is not None:
                error.add_note(str(self.error))

    def _on_host(self, lying: Mapping[str, Mapping[str, Tensor]]) -> Parts:
        """Return whole tensors on the host that no step changes before they are written; empty on the processes that do not write."""
        parts: Parts = {part: {} for part in lying}
        for part, named in lying.items():
            for name, tensor in named.items():
                # Gathering what is sharded needs all processes. One tensor at a time: a whole model may not fit the device.
                whole = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
                if not self._world.main:
                    continue
                if not self._asynchronous:
                    parts[part][name] = whole.cpu().contiguous()
                    continue
                copy = self._copies.get(part, {}).get(name)
                if copy is None or copy.shape != whole.shape or copy.dtype != whole.dtype:
                    copy = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=whole.is_cuda)
                parts[part][name] = copy.copy_(whole, non_blocking=True)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        if self._asynchronous:
            self._copies = parts
        return parts

    def _write_in_thread(self, parts: Parts, progress: dict[str, Any]) -> None:
        try:
            write_checkpoint(self.folder, parts, progress)
            prune(self.folder, progress["global_step"], self._keep, self._keep_every, self._keep_before())
        except BaseException as error:
            self.error = error


def write_checkpoint(folder: Path, parts: Parts, progress: dict[str, Any]) -> None:
    """Write a checkpoint and read it back; then its name appears, and `latest` names it.

    Args:
        folder: the run's `checkpoints`.
        parts: whole tensors on the host.
        progress: the fields of :class:`overnight.checkpoint.reader.TrainingProgress`.

    Raises:
        DataError: when that fails; the checkpoints before it are untouched.
    """
    checkpoint = folder / checkpoint_name(progress["global_step"])
    beside = folder / f".{checkpoint.name}.tmp"
    needed = sum(tensor.nbytes for named in parts.values() for tensor in named.values()) + _BESIDE_TENSORS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        disk = shutil.disk_usage(folder)
        if disk.free < needed and disk.total:  # Some network file systems do not know.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        beside.mkdir()
        checksums = {part: _write_part(beside / f"{part}.safetensors", named) for part, named in parts.items()}
        text = state_text(progress, checksums)
        _write_text(beside / "state.json", text)
        _from_disk(beside / "state.json")
        if (beside / "state.json").read_text(encoding="utf-8") != text:
            raise _misread(beside / "state.json")
        sync(beside)
        _put(beside, checkpoint)
        _write_text(folder / ".latest.tmp", checkpoint.name)
        (folder / ".latest.tmp").rename(folder / "latest")
        sync(folder)
    except (OSError, SafetensorError, DataError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        before = newest_checkpoint(folder)
        good = f"{before.name} before it is untouched" if before else "there is none before it"
        raise DataError(
            f"checkpoint {checkpoint} could not be written: {error}; {good}. {_remedy(error, folder, needed)} and run again"
        ) from error


def _write_part(path: Path, named: dict[str, Tensor]) -> str:
    """Write tensors, read them back from the disk, and return the checksum of the file."""
    path.touch()
    mode = path.stat().st_mode
    save_file(named, path)
    path.chmod(mode)  # The library's own lets nobody else read it.
    sync(path)
    _from_disk(path)
    digest, found = file_digest(path), load_file(path)
    if found.keys() != named.keys() or not all(_same_bits(found[name], tensor) for name, tensor in named.items()):
        raise _misread(path)
    return digest


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # As bytes: a NaN differs from itself.
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _misread(path: Path) -> DataError:
    return DataError(f"{path.name} does not read back as it was written: check the disk and the memory of this machine")


def _put(beside: Path, checkpoint: Path) -> None:
    """Give a checkpoint its name. One that has it already, and was damaged or left behind by going back, is put aside first."""
    aside = checkpoint.with_name(f"{checkpoint.name}.old")
    if checkpoint.is_symlink() or (checkpoint.exists() and not checkpoint.is_dir()):
        raise DataError(f"{checkpoint} is not a checkpoint folder, and is in the way: move it away")
    if checkpoint.exists():
        if aside.exists():
            _remove(aside)
        checkpoint.rename(aside)
    beside.rename(checkpoint)
    sync(checkpoint.parent)


def prune(folder: Path, step: int, keep: int, keep_every: int, keep_before: int | None) -> None:
    """Remove the checkpoints that need not be kept, once a new one is whole.

    What is of a later step than the new one is not of this run any more: it was passed over as damaged, or the run went back.

    Args:
        folder: the run's `checkpoints`.
        step: of the new one.
        keep, keep_every: as in :class:`CheckpointWriter`.
        keep_before: the step that it returns there.
    """
    found = [checkpoint for checkpoint in reversed(list_checkpoints(folder)) if checkpoint.is_dir() and not checkpoint.is_symlink()]
    past = [checkpoint for checkpoint in found if (step_of(checkpoint) or 0) <= step and checkpoint.suffix == ""]
    kept, stretch = set(past[-keep:]), 0
    for checkpoint in past if keep_every else ():
        if (step_of(checkpoint) or 0) // keep_every > stretch:
            stretch = (step_of(checkpoint) or 0) // keep_every
            kept.add(checkpoint)
    if keep_before is not None:
        kept.update([checkpoint for checkpoint in past if (step_of(checkpoint) or 0) <= keep_before][-1:])
    for checkpoint in found:
        if checkpoint not in kept:
            _remove(checkpoint)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; half of one never has a name that is read."""
    gone = checkpoint.with_name(f".{checkpoint.name}.tmp")
    # What another job still reads may resist on a network file system; the next save tries again.
    with contextlib.suppress(OSError):
        checkpoint.rename(gone)
        shutil.rmtree(gone)


def _remedy(error: Exception, folder: Path, needed: int) -> str:
    code = error.errno if isinstance(error, OSError) else int((re.findall(r"os error (\d+)", str(error)) or [0])[0])
    if code in FULL:
        return f"It takes {needed / 1e6:,.1f} MB, and {shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e6:,.1f} MB are free there: {how_to_make_room(code)}"
    return "Correct that"


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def _from_disk(path: Path) -> None:
    """Let the next reading of a synced file come from the disk, not from memory, where the system can."""
    if hasattr(os, "posix_fadvise"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
