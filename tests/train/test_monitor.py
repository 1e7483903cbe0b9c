"""What a run says: a line rewritten on a terminal, lines of text elsewhere, metrics cut back to a checkpoint, TensorBoard when asked."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.config import Run
from overnight.errors import UserError
from overnight.train import monitor
from overnight.train.checkpoint import Progress
from overnight.train.monitor import Line, Metrics, duration, progress_text
from overnight.train.pretrain import pretrain


class Terminal(io.StringIO):
    """What a person would see."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for text in line.split("\r"):
                shown = text + shown[len(text) :]
            lines.append(shown.rstrip())
        return lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now[0])
    return now


def test_on_a_terminal_the_line_is_rewritten_in_place() -> None:
    out = Terminal()
    line = Line(out)
    line.show("step 1  a long text about it")
    line.show("step 2  short")
    line.say("held out: good")
    line.show("step 3")
    line.show("step 4", final=True)
    line.say("done")
    assert out.screen() == ["held out: good", "step 4", "done", ""]


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_a_line_is_cut_to_the_width_of_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor.shutil, "get_terminal_size", lambda: os.terminal_size((columns, 24)))
    out = Terminal()
    Line(out).show("x" * 120)
    assert len(out.screen()[0]) == min(120, columns - 1)


def test_elsewhere_a_line_comes_every_ten_seconds_and_the_last_always(clock: list[float]) -> None:
    out = io.StringIO()
    line = Line(out)
    for step in range(1, 31):
        clock[0] += 1
        line.show(f"step {step}")
    line.show("step 31", final=True)
    assert out.getvalue() == "step 1\nstep 11\nstep 21\nstep 31\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7650, "2 h 07 min"),
        (360000, "100 h 00 min"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_progress_line_says_where_how_well_how_fast_and_how_long() -> None:
    progress = Progress(phase="long", step=30)
    values = {"loss": 2.34567, "lr": 0.0012345, "grad": 0.98765}
    text = progress_text(progress, 100, values, 12345.6, 70.0, 200.0)
    assert text == "long 30/100  loss 2.346  lr 0.00123  grad 0.988  12,346 tok/s  left 1 min 10 s (all phases 3 min 20 s)"
    assert progress_text(progress, 100, values, 1.0, 70.0, 70.0).endswith("left 1 min 10 s")


@given(st.data())
def test_metrics_go_on_from_any_byte_without_half_a_line(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with Metrics(path) as metrics:
            sizes = [0]
            for step in range(5):
                metrics.write("train", step=step, name="é")
                sizes.append(metrics.size())
        assert path.stat().st_size == sizes[-1]
        keep = data.draw(st.integers(0, sizes[-1] + 9))
        with Metrics(path, keep) as metrics:
            metrics.write("train", step="next")
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        whole = max(i for i, size in enumerate(sizes) if size <= keep)
        assert steps == [*range(whole), "next"]


def test_tensorboard_events_are_written_when_asked(tiny: Callable[..., Run]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tiny(**{"train.tensorboard": True})
    pretrain(run, Line(io.StringIO()))
    events = accumulator.EventAccumulator(str(run.run_dir / "tensorboard"))
    events.Reload()
    lines = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    for kind, name in (("train", "loss"), ("train", "lr"), ("eval", "mlm_accuracy")):
        expected = [(line["global_step"], pytest.approx(line[name])) for line in lines if line["kind"] == kind]
        assert [(e.step, e.value) for e in events.Scalars(f"{kind}/{name}")] == expected


def test_tensorboard_that_is_not_installed_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'overnight\[tensorboard\]'"):
        Metrics(tmp_path / "metrics.jsonl", tensorboard=tmp_path)


def test_nothing_of_tensorboard_is_written_unasked(tiny: Callable[..., Run]) -> None:
    run = tiny()
    pretrain(run, Line(io.StringIO()))
    assert not (run.run_dir / "tensorboard").exists()
