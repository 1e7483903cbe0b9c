"""What a command costs with all its processes: time, processor time, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

# Seconds between two looks.
_EVERY = 0.2


@dataclass(frozen=True)
class Cost:
    """Of a command that has ended."""

    seconds: float
    cpu_seconds: float
    """Of the process and of all that it has waited for."""
    peak_memory: int
    """Bytes: the greatest sum over the processes of their proportional sets, in which a page that n processes share counts an n-th each."""
    peak_disk: int
    """Bytes: the most that a folder was seen to hold."""


def measured(command: Sequence[str], folder: Path, log: Callable[[str], None]) -> Cost:
    """Run a command to its end.

    Args:
        command: to be run.
        folder: whose size is watched.
        log: called with each line of its output.

    Raises:
        SystemExit: with its exit code, where that is not 0.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
    peaks, ended = [0, 0], threading.Event()

    def sample() -> None:
        while not ended.wait(_EVERY):
            peaks[0], peaks[1] = max(peaks[0], _memory(process.pid)), max(peaks[1], _size(folder))

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    assert process.stdout is not None
    try:
        with process.stdout as output:
            for line in output:
                log(line.rstrip())
    except BaseException:  # a signal to this process alone
        process.terminate()
        process.wait()
        raise
    finally:
        ended.set()
        sampler.join()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(process.returncode)
    return Cost(time.perf_counter() - start, used.ru_utime + used.ru_stime, peaks[0], peaks[1])


def _memory(pid: int) -> int:
    """Return the proportional set of a process and all below it; the resident sets where the system does not know it."""
    total = 0
    try:
        for process in [tree := psutil.Process(pid), *tree.children(recursive=True)]:
            used = process.memory_full_info()
            total += getattr(used, "pss", used.rss)
    except psutil.Error:
        pass  # one that ended between the two calls
    return total


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue  # renamed or removed between the two calls
    return total
