"""What a run says while it works: a live view on a terminal, elsewhere a line every ten seconds, with the same numbers."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from overnight.display import duration, folded, number, share

# Seconds between plain progress lines where the output is no terminal, and between pictures where it is one.
_LINE_EVERY, _PICTURE_EVERY = 10.0, 0.25
_WIDEST_BAR = 50
# Share of the time that a loop may wait for its batches without a word.
_LONG_WAIT = 0.005


@dataclass(frozen=True)
class Status:
    """Where a run stands at a step."""

    phase: str
    steps: dict[str, tuple[int, int]]
    """Of every phase in order: steps done, and all."""
    left: dict[str, float] = field(default_factory=dict)
    """Seconds that are left of this phase and of those after it."""
    facts: dict[str, str] = field(default_factory=dict)
    """What else is known, in words: loss, learning rate, speed."""

    def text(self) -> str:
        """All of it in one line."""
        done, steps = self.steps[self.phase]
        words = [f"{self.phase} {done:,}/{steps:,}", *(f"{name} {value}" for name, value in self.facts.items())]
        if self.left:
            words.append(f"left {duration(self.left[self.phase])}")
        if len(self.left) > 1:
            words[-1] += f" (all phases {duration(sum(self.left.values()))})"
        return "  ".join(words)

    def picture(self, width: int, ascii_only: bool = False) -> Iterator[Text]:
        """A bar for each phase, and below them the facts, as lines of at most `width` columns."""
        counts = {name: f"{done:>{len(f'{steps:,}')},}/{steps:,}" for name, (done, steps) in self.steps.items()}
        times = {name: duration(self.left[name]) + " left" if name in self.left else "" for name in self.steps}
        columns = [max(map(len, texts)) for texts in (self.steps, counts.values(), times.values())]
        bar = min(width - sum(columns) - 6, _WIDEST_BAR)
        for name, (done, steps) in self.steps.items():
            style = "green" if done == steps else "cyan" if name == self.phase else "dim"
            line = Text().append(f"{name:{columns[0]}}  ", "bold" if name == self.phase else "dim")
            if bar > 4:
                line.append_text(_bar(done / steps, bar, style, ascii_only)).append("  ")
            yield line.append(f"{counts[name]:>{columns[1]}}  {times[name]:>{columns[2]}}".rstrip(), "" if name == self.phase else "dim")
        if len(self.left) > 1:
            whole = duration(sum(self.left.values())) + " left in all"
            yield Text(f"{whole:>{sum(columns) + (bar + 2 if bar > 4 else 0) + 4}}", "dim")
        line = Text()
        for name, value in self.facts.items():
            if line and len(line) + 3 + len(name) + 1 + len(value) > width:
                yield line
                line = Text()
            line.append("   " if line else "").append(f"{name} ", "dim").append(value)
        if line:
            yield line


def facts(values: Mapping[str, Any], peak: str = "", known: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a `train` line of metrics says, in words.

    Args:
        values: of the line; those that are absent are left out.
        peak: what `mfu` is a share of.
        known: what else is, in words; what only comes at times is after it, so that nothing moves when it does.
    """
    parts = {name.removesuffix("_loss"): value for name, value in values.items() if name.endswith("_loss")}
    shown: dict[str, str] = {"loss": number(values["loss"], 3)} if "loss" in values else {}
    if len(parts) > 1:
        shown |= {name: number(value, 3) for name, value in parts.items()}
    forms: dict[str, tuple[str, Callable[[Any], str]]] = {
        "lr": ("lr", lambda lr: f"{lr:.3g}"),
        "grad_norm": ("grad", lambda norm: "not finite" if norm is None else f"{norm:.3g}"),
        "loss_scale": ("loss scale", lambda scale: number(scale, 0)),
        "tokens_per_s": ("tokens/s", lambda rate: number(rate, 0)),
        "mfu": ("MFU", lambda used: share(used) + peak),
        "memory_gb": ("memory", lambda size: f"{size:.1f} GB"),
        "loader_wait": ("waits for data", lambda waited: share(waited) if waited > _LONG_WAIT else ""),
        "skipped": ("skipped", lambda count: number(count, 0) if count else ""),
    }
    said = {name: form(values[key]) for key, (name, form) in forms.items() if key in values}
    at_times = {name: said.pop(name) for name in ("waits for data", "skipped") if name in said}
    return {name: text for name, text in (shown | said | dict(known or {}) | at_times).items() if text}


def _bar(share: float, width: int, style: str, ascii_only: bool) -> Text:
    full, half, empty = ("#", "", "-") if ascii_only else ("━", "╸", "━")
    halves = round(2 * width * min(share, 1.0))
    done = full * (halves // 2) + half * (halves % 2)
    return Text(done, style).append(empty * (width - len(done)), "bright_black")


class Line:
    """The lines that a run says, and its progress below them.

    On a terminal the progress stays at the bottom and is painted over in place, a few times a second; elsewhere, and with TERM=dumb,
    it is a plain line every ten seconds. NO_COLOR is obeyed.

    Args:
        out: where to; standard output by default.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._live = self._out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._console = Console(file=self._out, highlight=False)
        self._last = -math.inf
        self._shown: str | Status = ""
        self._painted: list[int] = []  # columns of each line of the picture that stands on the terminal
        self._stderr: TextIO | None = None

    def due(self) -> bool:
        """Whether a terminal waits for a new picture; elsewhere every line is worth showing to :meth:`show`."""
        return self._live and time.monotonic() - self._last >= _PICTURE_EVERY

    def show(self, state: str | Status, final: bool = False) -> None:
        """Show the newest state, if that before is old enough; `final` leaves it standing as a line."""
        now = time.monotonic()
        if final:
            self.clear()
            self.say(_text(state))
        elif self._live:
            self._shown = state
            if self.due():
                self._last = now
                self._catch_stderr()
                self._write(self._up() + self._picture())
        elif now - self._last >= _LINE_EVERY:
            self._last = now
            self.say(_text(state))

    def say(self, text: str) -> None:
        """Print a line that stays, above the progress; a terminal narrower than the line breaks it between words."""
        above = (
            self._up()
            + ("\x1b[J" if self._painted else "")
            + (folded(text, shutil.get_terminal_size().columns) if self._live else text)
            + "\n"
        )
        self._painted = []
        if isinstance(self._shown, Status):
            above += self._picture()
        self._write(above)

    def clear(self) -> None:
        """Take the progress off the terminal, until something is shown again."""
        if self._painted:
            self._write(self._up() + "\x1b[J")
        self._shown, self._painted = "", []
        if self._stderr is not None:
            sys.stderr, self._stderr = self._stderr, None

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _up(self) -> str:
        """To the beginning of the picture; lines that are wider than the terminal has become have been wrapped by it."""
        if not self._painted:
            return ""
        columns = shutil.get_terminal_size().columns
        rows = sum(max(1, -(-width // columns)) for width in self._painted)
        return "\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "")

    def _picture(self) -> str:
        """The shown state in the terminal's own language, painted over what stands there, with nothing erased first that comes again."""
        # A line as wide as the terminal would be wrapped by some.
        size = shutil.get_terminal_size()
        width = max(size.columns - 1, 1)
        ascii_only = not self._console.encoding.startswith("utf")
        lines = [Text(self._shown)] if isinstance(self._shown, str) else list(self._shown.picture(width, ascii_only))
        lines = lines[: max(size.lines - 1, 1)]
        with self._console.capture() as captured:
            for line in lines:
                line.truncate(width, overflow="ellipsis" if not ascii_only else "crop")
                self._console.print(line, soft_wrap=True)
        self._painted = [cell_len(line.plain) for line in lines]
        painted = captured.get().removesuffix("\n").split("\n")
        # The cursor hides while it moves, and no longer: a killed run leaves it there.
        return "\x1b[?25l" + "\n".join(line + "\x1b[K" for line in painted) + "\x1b[J\x1b[?25h"

    def _catch_stderr(self) -> None:
        """Let what others print, such as warnings, come above the picture instead of into it."""
        if isinstance(self._shown, Status) and self._stderr is None and sys.stderr.isatty():
            self._stderr, sys.stderr = sys.stderr, _Above(self, sys.stderr)


class _Above(io.TextIOBase):
    """Standard error while a picture stands at the bottom of the terminal: whole lines go above it."""

    def __init__(self, line: Line, below: TextIO) -> None:
        self._line, self._below, self._rest = line, below, ""

    def fileno(self) -> int:
        return self._below.fileno()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._line.say(line)
        return len(text)


def _text(state: str | Status) -> str:
    return state if isinstance(state, str) else state.text()
