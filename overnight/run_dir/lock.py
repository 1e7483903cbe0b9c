"""One job a run folder: a lock that the kernel frees however the process ends, and a sign that the job is alive."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from overnight.errors import DataError, UserError
from overnight.run_dir.atomic import FULL, naming, write_json
from overnight.state_files import parse_json

# Seconds between heartbeats at least.
_BEAT_EVERY = 10.0
# Seconds that a job which was started again waits for the lock, because a process of its last start may still be ending on another machine.
_PATIENCE = 60.0


@contextmanager
def run_lock(folder: Path, movable: bool = True) -> Iterator[None]:
    """Let this process alone write a run folder, which is made if absent.

    The lock is `flock` on `folder/lock`: it ends with the process, also after `kill -9`, and leaves nothing to clear away. A job that its
    launcher or scheduler has started again waits up to a minute for it.

    Args:
        movable: whether what is done could be done in another folder, for messages.

    Raises:
        UserError: when another process holds it, naming its number and host, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = (folder / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        if error.errno in FULL:
            raise
        other = "give this run another folder (--out=...)" if movable else "name a copy of it that you may write"
        raise UserError(f"{folder}: cannot be written ({error.strerror}); let yourself write into it, or {other}") from None
    deadline = time.monotonic() + (_PATIENCE if _started_again() else 0.0)
    with opened as file:
        while not try_lock(file):
            if time.monotonic() >= deadline:
                how = "stop it, or give this run its own folder (--out=...)" if movable else "or stop it"
                raise UserError(f"{folder} is being written by another job, {holder_of(file)}; wait until it ends, {how}")
            time.sleep(0.1)
        sign(file)
        yield


@contextmanager
def preparation_lock(folder: Path) -> Iterator[None]:
    """Let this process alone prepare a data folder; the system takes the lock back when the process ends, however it ends.

    Raises:
        DataError: when another process prepares it.
    """
    with open(folder / ".lock", "w") as file:
        if not try_lock(file):
            raise DataError(f"{folder}: another process is preparing this folder; wait for it, or set data.dir to another")
        yield


def try_lock(file: TextIO) -> bool:
    """Take the lock of an open file, which ends with the process; return whether no other process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _started_again() -> bool:
    # `overnight launch`, torchrun and Slurm count the starts.
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def sign(file: TextIO) -> None:
    """Write into the file of a lock that was taken who has it."""
    with naming(Path(file.name)):
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()


def holder_of(file: TextIO) -> str:
    """Return who has a lock that could not be taken, in words."""
    file.seek(0)
    try:
        holder = parse_json(file.read())
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):  # It has the lock and not yet written its name.
        return "which has just begun"


class Heartbeat:
    """`heartbeat.json` in a run folder: when the job was last seen alive, and where it was.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "heartbeat.json"
        self._last = -_BEAT_EVERY

    def beat(self, phase: str, step: int) -> None:
        """Write it anew, unless that was done in the last ten seconds."""
        now = time.monotonic()
        if now - self._last >= _BEAT_EVERY:
            self._last = now
            here = {"time": time.time(), "phase": phase, "step": step, "pid": os.getpid(), "host": socket.gethostname()}
            write_json(self._path, here)
