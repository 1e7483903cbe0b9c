"""What a run says while it works: metrics.jsonl always, one progress line, its speed, TensorBoard if asked."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch
from torch import Tensor

from overnight.batches.size import sequences_before
from overnight.config import Phase, Run
from overnight.errors import UserError
from overnight.train.checkpoint import Progress
from overnight.train.loop import Step
from overnight.train.parallel import World, total

# Seconds between plain progress lines where the output is no terminal.
_LINE_EVERY = 10.0


class Metrics:
    """The run's metrics.jsonl: one JSON object a line, in the order of the steps.

    Args:
        path: the file; made if absent. None writes nothing, where another process does.
        keep_bytes: forget what was written after this many bytes, because the run goes on from there.
        tensorboard: folder for TensorBoard events, or None.
    """

    def __init__(self, path: Path | None, keep_bytes: int = 0, tensorboard: Path | None = None) -> None:
        self._board = _summary_writer(tensorboard) if tensorboard is not None else None
        if path is not None:
            path.touch()
            with path.open("rb+") as file:
                file.truncate(file.read(keep_bytes).rfind(b"\n") + 1)
        self._file: TextIO = (path or Path(os.devnull)).open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Append one line."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()
        if self._board is not None and kind in ("train", "eval"):
            for name, value in values.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{kind}/{name}", value, values["global_step"])

    def size(self) -> int:
        """Bytes written so far."""
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "train.tensorboard = True: needs the extra `tensorboard`: pip install 'overnight[tensorboard]', or leave it out"
        ) from None
    return SummaryWriter(str(folder))  # type: ignore[no-untyped-call]


class Line:
    """The progress line: rewritten in place on a terminal, a plain line every ten seconds elsewhere.

    Args:
        out: where to; standard output by default.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._last = 0.0
        self._width = 0

    def show(self, text: str, final: bool = False) -> None:
        """Show the newest state; `final` leaves it standing."""
        now = time.monotonic()
        if self._live:
            # A line that wraps could not be rewritten in place.
            text = text[: shutil.get_terminal_size().columns - 1]
            self._out.write("\r" + text.ljust(self._width) + ("\n" if final else ""))
            self._width = 0 if final else len(text)
        elif final or now - self._last >= _LINE_EVERY:
            self._out.write(text + "\n")
            self._last = now
        self._out.flush()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._live and self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._width = 0
        self._out.write(text + "\n")
        self._out.flush()


def duration(seconds: float) -> str:
    """Seconds as people read them: 42 s, 3 min 05 s, 2 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def progress_text(progress: Progress, steps: int, values: dict[str, float], rate: float, left: float, left_all: float) -> str:
    """One line: phase, step, losses, learning rate, tokens a second, time left in the phase and in all.

    Args:
        steps: of the phase.
        values: to show, such as loss and lr.
        rate: tokens a second.
        left, left_all: seconds.
    """
    shown = "  ".join(f"{name} {value:.3g}" if name in ("lr", "grad") else f"{name} {value:.3f}" for name, value in values.items())
    left_text = duration(left) + (f" (all phases {duration(left_all)})" if left_all > left + 1 else "")
    return f"{progress.phase} {progress.step}/{steps}  {shown}  {rate:,.0f} tok/s  left {left_text}"


class Speed:
    """Counters, losses and clock of a phase: throughput since the last line, and the time that is left."""

    def __init__(self, run: Run, number: int, progress: Progress, world: World | None = None) -> None:
        self._world = world or World()
        self._phases = list(run.phases.values())
        self._number = number
        self._clock = time.perf_counter()
        self._unread: list[dict[str, Tensor]] = []
        self._since = [0.0, 0.0, 0.0]  # seconds, tokens, sequences since the last line
        self._all = [0.0, 0.0, 0.0]

    def note(self, done: Step, progress: Progress, wait: bool) -> None:
        """Count a step; its losses stay on the device until they are read, with all before them.

        Args:
            wait: read them now. The device has then done the step, so that the clock counts it.
        """
        self._unread.append(done.losses)
        if wait:
            self.read(progress)
        now = time.perf_counter()
        spent, self._clock = now - self._clock, now
        progress.step, progress.global_step = done.step, progress.global_step + 1
        progress.skipped += bool(done.skipped)
        progress.tokens += done.tokens
        progress.sequences += done.sequences
        progress.seconds += spent
        for totals in (self._since, self._all):
            for at, value in enumerate((spent, done.tokens, done.sequences)):
                totals[at] += value

    def read(self, progress: Progress) -> None:
        """Add up the losses that were not read yet, of all processes; what is not finite, of a step that was skipped, is left out."""
        if not self._unread:
            return
        names = list(self._unread[0])
        read = total(torch.stack([losses[name] for losses in self._unread for name in names]), self._world).view(-1, len(names))
        for row in read.tolist():
            for name, loss in zip(names, row, strict=True):
                before, count = progress.running.get(name, [0.0, 0])
                if math.isfinite(loss):
                    progress.running[name] = [before + loss, count + 1]
        self._unread = []

    def pause(self) -> None:
        """Do not count the time since the last step."""
        self._clock = time.perf_counter()

    def rate(self, phase: Phase) -> dict[str, float]:
        """Tokens and sequences a second since the last call."""
        seconds, tokens, sequences = self._since
        self._since = [0.0, 0.0, 0.0]
        return {"tokens_per_s": tokens / seconds, "sequences_per_s": sequences / seconds}

    def left(self, progress: Progress) -> tuple[float, float, float]:
        """Tokens a second, and the seconds left in this phase and in all; later phases at the same rate of tokens."""
        seconds, tokens, sequences = self._all
        phase = self._phases[self._number]
        whole = [sequences_before(p, p.steps) * p.length / phase.length for p in self._phases[self._number :]]
        here = (whole[0] - sequences_before(phase, progress.step)) / sequences * seconds
        later = sum(whole[1:]) / sequences * seconds
        return tokens / seconds, here, here + later
