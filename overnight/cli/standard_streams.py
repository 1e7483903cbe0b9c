"""Standard output and standard error: what they cannot show, and what becomes of a command whose reader has gone or whose disk is full."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, cast

OUTPUT = "standard output"
# Of a pipe that nobody reads, and of a terminal that was closed.
_NO_READER = (errno.EPIPE, errno.EIO)


class _Output(io.FileIO):
    """Where standard output or standard error leads: an error names it.

    Args:
        descriptor: of the file, which stays open.
        name: of the stream.
    """

    works_on = False
    """Whether what is written is dropped once the reader has gone, instead of being an error."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._called = name

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self.works_on or error.errno not in _NO_READER:
                raise OSError(error.errno, error.strerror, self._called) from None
            discard(self.fileno())
            if self._called == OUTPUT:
                print(f"overnight: the reader of {OUTPUT} has gone; the command continues and prints nothing more there", file=sys.stderr)
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Let both streams show what their encoding does not have as `\\xe4` (else a name would end a run in its middle), and have their errors name them."""
    for name, called in (("stdout", OUTPUT), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever starts us (`>&-`); a file that is opened later must not take its place
            nowhere = _Output(os.open(os.devnull, os.O_WRONLY), called)
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(nowhere), "utf-8", "backslashreplace"))
            continue
        errors = getattr(stream, "errors", None)
        # In the locale C they are opened with `surrogateescape`, which shows bytes of a file's name, and no character that ASCII does not have.
        if errors in ("strict", "surrogateescape"):
            errors = "backslashreplace"
        # Only what Python itself has opened: a stream of whoever calls us is theirs.
        if type(stream) is io.TextIOWrapper and type(getattr(stream.buffer, "raw", stream.buffer)) is io.FileIO:
            stream.flush()
            setattr(sys, name, _named(stream, called, errors))
        elif isinstance(stream, io.TextIOWrapper) and errors != stream.errors:
            stream.reconfigure(errors=errors)


def _named(stream: io.TextIOWrapper, name: str, errors: str | None) -> io.TextIOWrapper:
    raw = _Output(stream.fileno(), name)
    # An error message without a reader is no error, and a terminal that closes sends a signal, at which a checkpoint is yet to be written.
    raw.works_on = name != OUTPUT or stream.isatty()
    buffer = cast("io.BufferedWriter", raw) if stream.write_through else io.BufferedWriter(raw)
    lines, through = stream.line_buffering, stream.write_through
    return io.TextIOWrapper(buffer, stream.encoding, errors, line_buffering=lines, write_through=through)


def work_on_without_reader() -> None:
    """Drop what is printed once the reader of standard output has gone: for a command whose work lies in files, and is not to be lost with a `tee`."""
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if isinstance(raw, _Output):
        raw.works_on = True


def discard(descriptor: int) -> None:
    """Let what is written to an open file go nowhere from now on; processes that are started later inherit it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
