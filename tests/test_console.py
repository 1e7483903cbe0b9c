"""What a run says: a picture painted over in place on a terminal, lines of text elsewhere, with the same numbers."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight import console
from overnight.config import Run
from overnight.console import Line, Status, facts, table
from overnight.engine.pretrain import pretrain
from overnight.signals import Interrupted

STATUS = Status(
    "long",
    {"short": (1800, 1800), "long": (1030, 4100), "longest": (0, 100)},
    {"long": 70.0, "longest": 130.0},
    {"loss": "2.346", "lr": "0.00123", "tokens/s": "12,346", "MFU": "31.2 % of the measured peak", "memory": "1.2 GB"},
)


class Terminal(io.StringIO):
    """What a person would see: the few sequences that are used, on a screen that never scrolls away."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines, row, column, self.hidden = [""], 0, 0, False
        for code, text in re.findall(r"(\x1b\[[?\d;]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", self.getvalue()):
            if text:
                lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
                column += len(text)
            elif code == "\r":
                column = 0
            elif code == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif code[-1] == "A":
                row -= int(code[2:-1])
                lines[row] = lines[row].ljust(column)
                assert row >= 0
            elif code == "\x1b[2K":
                lines[row] = ""
            elif code[-1] in "lh":
                self.hidden = code[-1] == "l"
            else:
                assert code[-1] == "m", code
        while len(lines) > row + 1 and not lines[-1].strip():
            lines.pop()
        return [line.rstrip() for line in lines]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    """A terminal of a size, of a kind that can be painted on."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def make(columns: int = 80, rows: int = 24) -> Terminal:
        made = Terminal()
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(rows))
        return made

    return make


def test_on_a_terminal_a_text_is_rewritten_in_place(terminal: Callable[..., Terminal], clock: list[float]) -> None:
    out = terminal()
    line = Line(out)
    for text in ("step 1  a long text about it", "step 2  short"):
        line.update(text)
        clock[0] += 1
    assert out.screen() == ["step 2  short"]
    line.print("validation: good")
    line.update("step 3")
    line.update("step 4", final=True)
    line.print("done")
    assert out.screen() == ["validation: good", "step 4", "done", ""]


def test_a_picture_stays_below_the_lines_that_are_said(terminal: Callable[..., Terminal], clock: list[float]) -> None:
    out = terminal()
    line = Line(out)
    line.print("phase long")
    line.update(STATUS)
    first = out.screen()
    assert first[0] == "phase long"
    assert first[1].startswith("short    ━") and first[1].endswith("1,800/1,800")
    assert first[2].endswith("1,030/4,100  1 min 10 s left") and first[3].endswith("  0/100  2 min 10 s left")
    assert first[4].endswith("     in all  3 min 20 s left") and len({len(text) for text in first[2:4]}) == 1
    assert first[5:] == ["loss 2.346      lr 0.00123   tokens/s 12,346   MFU 31.2 % of the measured peak", "memory 1.2 GB"]
    line.print("validation: good\nand more")
    assert out.screen() == ["phase long", "validation: good", "and more", *first[1:]]
    clock[0] += 1
    line.update(replace(STATUS, facts={"loss": "2.3"}))
    assert out.screen()[-1] == "loss 2.3"
    line.update(STATUS, final=True)
    assert out.screen()[:3] == ["phase long", "validation: good", "and more"] and out.screen()[3].startswith("long 1,030/4,100  loss 2.346")
    assert " ".join(text.strip() for text in out.screen()[3:-1]) == STATUS.text(), "broken between words, where 80 columns end"
    assert all(len(text) <= 80 for text in out.screen())


def test_a_terminal_is_painted_four_times_a_second_at_most(terminal: Callable[..., Terminal], clock: list[float]) -> None:
    out = terminal()
    line = Line(out)
    pictures = 0
    for _ in range(1000):
        clock[0] += 0.01
        before = len(out.getvalue())
        if line.due():
            line.update(STATUS)
        pictures += len(out.getvalue()) > before
    assert 35 <= pictures <= 40


@given(
    columns=st.integers(2, 200),
    rows=st.integers(2, 30),
    facts=st.lists(st.dictionaries(st.text("ab ", max_size=9), st.text("1 ", max_size=9))),
)
def test_pictures_fit_any_terminal_and_leave_what_is_above_them(columns: int, rows: int, facts: list[dict[str, str]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(columns))
        patch.setenv("LINES", str(rows))
        out = Terminal()
        patch.setattr(console, "_PICTURE_EVERY", 0.0)
        line = Line(out)
        line.print("above")
        for known in [{}, *facts, STATUS.facts]:
            line.update(replace(STATUS, facts=known))
        line.print("and more")
        assert out.screen()[:2] == ["above", "and more"] and len(out.screen()) <= 2 + rows
        line.clear()
        assert out.screen() == ["above", "and more", ""]


def test_the_cursor_is_there_after_every_write(terminal: Callable[..., Terminal], clock: list[float]) -> None:
    out = terminal()
    line = Line(out)
    line.update(STATUS)
    out.screen()
    assert not out.hidden
    line.clear()
    assert out.screen() == [""] and not out.hidden


def test_no_color_leaves_no_color(terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = terminal()
    Line(out).update(STATUS)
    # 1, 2 and 0 are bold, dim and plain.
    assert {code for codes in re.findall(r"\x1b\[([\d;]*)m", out.getvalue()) for code in codes.split(";")} <= {"0", "1", "2"}


@pytest.mark.parametrize("kind", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_lines(
    kind: str, terminal: Callable[..., Terminal], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = terminal()
    monkeypatch.setenv("TERM", kind)
    line = Line(out)
    for _ in range(15):
        clock[0] += 1
        assert not line.due()
        line.update(STATUS)
    assert out.getvalue() == (STATUS.text() + "\n") * 2


def test_a_terminal_without_unicode_gets_ascii_bars(terminal: Callable[..., Terminal]) -> None:
    out = terminal()
    out.encoding = "ascii"  # type: ignore[misc]
    Line(out).update(STATUS)
    assert out.getvalue().isascii() and "----" in out.getvalue()


def test_warnings_come_above_the_picture_and_standard_error_is_given_back(
    terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, error = terminal(columns=200), Terminal()
    monkeypatch.setattr(sys, "stderr", error)
    line = Line(out)
    line.update(STATUS)
    picture = out.screen()
    print("UserWarning: the disk is slow\n  disk()", file=sys.stderr)
    sys.stderr.write("half a ")
    sys.stderr.write("line\n")
    assert out.screen() == ["UserWarning: the disk is slow", "  disk()", "half a line", *picture]
    line.clear()
    assert sys.stderr is error and error.getvalue() == ""


def test_elsewhere_a_line_comes_every_ten_seconds_and_the_last_always(clock: list[float]) -> None:
    out = io.StringIO()
    line = Line(out)
    for step in range(1, 31):
        clock[0] += 1
        line.update(f"step {step}")
    line.update("step 31", final=True)
    assert out.getvalue() == "step 1\nstep 11\nstep 21\nstep 31\n"


def test_the_plain_line_has_the_same_numbers() -> None:
    assert STATUS.text() == (
        "long 1,030/4,100  loss 2.346  lr 0.00123  tokens/s 12,346  MFU 31.2 % of the measured peak  memory 1.2 GB  "
        "left 1 min 10 s (all phases 3 min 20 s)"
    )
    assert replace(STATUS, left={"long": 70.0}).text().endswith("left 1 min 10 s")


def test_the_facts_of_a_line_of_metrics_are_in_words_and_only_those_that_matter() -> None:
    line = {"loss": 2.34567, "mlm_loss": 2.0, "nsp_loss": 0.34567, "lr": 0.0012345, "grad_norm": 0.98765, "tokens": 5, "mfu": 0.3123}
    assert facts(line, " of the peak") == {
        "loss": "2.346",
        "mlm": "2.000",
        "nsp": "0.346",
        "lr": "0.00123",
        "grad": "0.988",
        "MFU": "31.2 % of the peak",
    }
    assert facts({"loss": 2.0, "mlm_loss": 2.0, "loader_wait": 0.004, "skipped": 0}) == {"loss": "2.000"}
    line = {"loader_wait": 0.0072, "skipped": 3, "loss_scale": 65536.0, "memory_gb": 1.24, "grad_norm": None}
    found = facts(line, known={"validation accuracy": "12.3 %", "checkpoint": ""})
    assert list(found.items()) == [
        ("grad", "not finite"),
        ("loss scale", "65,536"),
        ("memory", "1.2 GB"),
        ("validation accuracy", "12.3 %"),
        ("waits for data", "0.7 %"),
        ("skipped", "3"),
    ]


def test_a_table_aligns_its_columns_and_leaves_its_cells_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = [("name", "steps", "time"), ("[bold]short[/] :smile:", "1,800", "2 min"), ("", "9", "")]
    assert table(rows).split("\n") == [
        "name                    steps   time",
        "[bold]short[/] :smile:  1,800  2 min",
        "                            9",
    ]
    assert table([("a", "one two three")], left=2, width=11) == "a  one two\n   three"
    assert len(table([("a", "word " * 1000)], left=2).splitlines()) == 1


def test_a_run_on_a_terminal_shows_every_phase_and_leaves_it_clean(
    tiny: Callable[..., Run], terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = terminal(250)
    monkeypatch.setattr(console, "_PICTURE_EVERY", 0.0)
    run = tiny()
    line = Line(out)
    pretrain(run, line)
    text = out.getvalue()
    assert "validation accuracy" in text and "of the measured peak" in text and "checkpoint" in text
    screen = out.screen()
    assert [text.split("  ")[0] for text in screen if re.match(r"(short|long) (6/6|4/4)  loss", text)] == ["short 6/6", "long 4/4"]
    assert "━" not in "".join(screen) and screen[-1] == ""


def test_an_interruption_leaves_the_terminal_clean(
    tiny: Callable[..., Run], terminal: Callable[..., Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    from overnight.engine import loop

    out, real = terminal(250), loop.clip_and_step
    monkeypatch.setattr(console, "_PICTURE_EVERY", 0.0)
    error = Terminal()
    monkeypatch.setattr(sys, "stderr", error)
    calls = []

    def step(*args: object, **kwargs: object) -> object:
        calls.append(sys.stderr)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "clip_and_step", step)
    with pytest.raises(Interrupted):
        pretrain(tiny(), Line(out))
    assert calls[-1] is not error and sys.stderr is error
    assert "━" not in "".join(out.screen()) and out.screen()[-1] == ""
