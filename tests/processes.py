"""Real processes without the seconds that importing torch takes: each is forked from one that has it imported."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from types import TracebackType
from typing import Any

HANG = 600.0
"""Seconds after which a process is said to hang. No test waits so long, however busy the machine is."""

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.imported"])


def warm() -> BaseContext:
    """What starts processes by forking the one that has all imported, which is started now: later it might inherit that signals are held."""
    forkserver.ensure_running()
    return _FORKS


class Process:
    """A function at work in a process of its own: used like a subprocess.Popen, and killed at the end of a `with`.

    Args:
        work: the function.
        arguments: of the function.
        errors: a file for what it says on its standard error; without one both outputs are read as one.
    """

    def __init__(self, work: Callable[..., object], *arguments: Any, errors: Path | None = None) -> None:
        reader, writer = _FORKS.Pipe(duplex=False)
        with reader, writer:
            self._process = _FORKS.Process(target=_work, args=(writer, errors, os.getcwd(), work, arguments))
            self._process.start()
            self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str]:
        """Wait for its end; its exit code and what it has printed that nobody has read."""
        watch = threading.Timer(HANG, self._process.kill)
        watch.start()
        try:
            output = self.stdout.read()
            self._process.join()
        finally:
            watch.cancel()
        assert self.returncode is not None
        return self.returncode, output

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        self.stdout.close()


def overnight(*argv: object, signal_at: tuple[str, int] | None = None, errors: Path | None = None, **environment: object) -> Process:
    """`python -m overnight ARGV` as a process, which sends itself a signal, if one is given, once it has printed a text."""
    variables = {name: str(value) for name, value in environment.items()}
    return Process(_command, [str(word) for word in argv], signal_at, variables, errors=errors)


def wait_until(fact: Callable[[], object], process: Any) -> None:
    """Wait until something is so, as long as a process lives that makes it so."""
    end = time.monotonic() + HANG
    poll = getattr(process, "poll", lambda: process.returncode)
    while not fact():
        assert poll() is None, process.stdout.read()
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.001)


def _command(argv: list[str], signal_at: tuple[str, int] | None, environment: dict[str, str]) -> None:
    from overnight.cli.main import command

    os.environ |= environment

    class Watched(io.TextIOWrapper):
        def write(self, text: str) -> int:
            count = super().write(text)
            if signal_at and signal_at[0] in text:
                self.flush()
                os.kill(os.getpid(), signal_at[1])
            return count

    if signal_at:
        sys.stdout = Watched(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8", line_buffering=True)
    sys.argv = ["overnight", *argv]
    command()


def _work(writer: Any, errors: Path | None, folder: str, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    for output in (1, 2):
        os.dup2(writer.fileno(), output)
    writer.close()
    if errors:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    work(*arguments)
