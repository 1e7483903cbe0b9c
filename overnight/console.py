"""What a run prints while it works: a live view on a terminal, elsewhere a line every ten seconds, with the same values; and aligned tables."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Self, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from overnight.display import CONTROL, duration, folded, number, share

# Seconds between plain progress lines where the output is no terminal, and between pictures where it is one.
_LINE_EVERY, _PICTURE_EVERY = 10.0, 0.25
_WIDEST_BAR = 50
# Share of the time that a loop may wait for its batches without a word.
_LONG_WAIT = 0.005


def table(rows: Sequence[Sequence[str]], left: int = 1, width: int = 10_000) -> str:
    """Return rows as aligned lines without colors.

    Args:
        rows: of cells, as many in each.
        left: number of columns that are aligned to the left; the others hold numbers.
        width: of the whole table (characters); cells that do not fit continue in the next line.
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(len(rows[0])):
        grid.add_column(justify="left" if column < left else "right", overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(grid)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


class Styled:
    """Lines of text of which parts are emphasized on a terminal; elsewhere the text alone, and its reader may go away at any time.

    On a terminal control characters of a text are shown as a replacement character, so that no text can steer it. NO_COLOR is obeyed.

    Args:
        out: where to; standard output by default.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._console = Console(file=self._out, highlight=False, markup=False, emoji=False) if self._out.isatty() else None

    def print(self, *parts: str | tuple[str, str]) -> None:
        """Print a line.

        Args:
            parts: texts; of a pair the second is its style, as rich has them.
        """
        if self._console is None:  # rich would end the process where a pipe is closed
            self._out.write("".join(part if isinstance(part, str) else part[0] for part in parts) + "\n")
            return
        styled = [(CONTROL.sub("\ufffd", text), style) for text, style in ((part, "") if isinstance(part, str) else part for part in parts)]
        self._console.print(Text.assemble(*styled))


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
        """Return all of it in one line."""
        done, steps = self.steps[self.phase]
        words = [f"{self.phase} {done:,}/{steps:,}", *(f"{name} {value}" for name, value in self.facts.items())]
        if self.left:
            words.append(f"left {duration(self.left[self.phase])}")
        if len(self.left) > 1:
            words[-1] += f" (all phases {duration(sum(self.left.values()))})"
        return "  ".join(words)

    def picture(self) -> RenderableType:
        """Return a bar for each phase, and below them the facts."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column()
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True)
        for name, (done, steps) in self.steps.items():
            left = f"{duration(self.left[name])} left" if name in self.left else ""
            color = "green" if done == steps else "cyan"
            bar = ProgressBar(steps, done, _WIDEST_BAR, complete_style=color, finished_style=color)
            grid.add_row(Text(name), bar, f"{done:,}/{steps:,}", left, style="" if name == self.phase else "dim")
        if len(self.left) > 1:
            grid.add_row("", "", "in all", f"{duration(sum(self.left.values()))} left", style="dim")
        return Group(grid, Columns([Text.assemble((f"{name} ", "dim"), value) for name, value in self.facts.items()], padding=(0, 3)))


def facts(values: Mapping[str, Any], peak: str = "", known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what a `train` line of metrics says, in words.

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
        "data_wait_fraction": ("waits for data", lambda waited: share(waited) if waited > _LONG_WAIT else ""),
        "skipped": ("skipped", lambda count: number(count, 0) if count else ""),
    }
    said = {name: form(values[key]) for key, (name, form) in forms.items() if key in values}
    at_times = {name: said.pop(name) for name in ("waits for data", "skipped") if name in said}
    return {name: text for name, text in (shown | said | dict(known or {}) | at_times).items() if text}


class Line:
    """The lines that a run prints, and its progress below them.

    On a terminal the progress stays at the bottom and is painted over in place, a few times a second; elsewhere, and with TERM=dumb,
    it is a plain line every ten seconds. NO_COLOR is obeyed.

    Args:
        out: where to; standard output by default.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._console = Console(file=self._out, highlight=False, markup=False, emoji=False)
        self._terminal = self._out.isatty() and self._console.is_interactive
        self._last = -math.inf
        self._live: Live | None = None
        self._stays = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def due(self) -> bool:
        """Return whether a terminal waits for a new picture; elsewhere every line is worth giving to :meth:`update`."""
        return self._terminal and time.monotonic() - self._last >= _PICTURE_EVERY

    def update(self, state: str | Status, final: bool = False) -> None:
        """Show the newest state, if that before is old enough; `final` leaves it standing as a line."""
        text = state if isinstance(state, str) else state.text()
        if final:
            self.clear()
            self.print(text)
            return
        now = time.monotonic()
        if now - self._last < (_PICTURE_EVERY if self._terminal else _LINE_EVERY):
            return
        self._last = now
        if not self._terminal:
            self.print(text)
            return
        self._stays = isinstance(state, Status)
        if self._live is None:
            # Where standard error is the terminal too, warnings come above the picture instead of into it.
            to_terminal = sys.stderr.isatty()
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=to_terminal)
            self._live.start()
            # Live hides the cursor until it ends, which a killed run does not.
            self._console.show_cursor()
        picture = state.picture() if isinstance(state, Status) else Text(text, no_wrap=True, overflow="ellipsis")
        self._live.update(picture, refresh=True)

    def print(self, text: str) -> None:
        """Print a line that stays, above the progress; a terminal narrower than the line breaks it between words."""
        if not self._stays:
            self.clear()
        if self._terminal:
            self._console.print(folded(text, self._console.width), soft_wrap=True)
        else:
            self._out.write(f"{text}\n")
        self._out.flush()

    def clear(self) -> None:
        """Take the progress off the terminal, until something is shown again."""
        if self._live is not None:
            self._live.update("")  # else a picture that is taller than the terminal would be painted whole at the end
            self._live.stop()
        self._live, self._stays = None, False
