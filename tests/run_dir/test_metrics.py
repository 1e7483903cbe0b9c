"""What a run writes of itself: metrics cut back to a checkpoint, the same values on TensorBoard and Weights & Biases, speed and loader wait."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches.packing import Sizes
from overnight.checkpoint.reader import TrainingProgress
from overnight.cli.main import main
from overnight.config import Run
from overnight.distributed.world import World
from overnight.engine import loop, throughput, training_run
from overnight.engine.loop import StepResult
from overnight.engine.throughput import Throughput
from overnight.errors import DataError, UserError
from overnight.models.flops import Peak, training_flops
from overnight.report.summary import summarize
from overnight.run_dir import metrics as metrics_module
from overnight.run_dir.metrics import Metrics, TensorBoard
from tests.engine.test_pretrain import finish, recipe_of

Make = Callable[..., Run]


def lines(run: Run, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] in kinds]


def crash_once(monkeypatch: pytest.MonkeyPatch, run: Run, step: int) -> None:
    """Train until an optimizer step fails."""
    real, count = loop.clip_and_step, 0

    def crash(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == step:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "clip_and_step", crash)
        with pytest.raises(KeyboardInterrupt):
            finish(run)


@given(st.data())
def test_metrics_go_on_from_any_byte_without_half_a_line(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with Metrics(path) as metrics:
            sizes = [0]
            for step in range(5):
                metrics.write("other", step=step, name="é")
                sizes.append(metrics.sync())
        assert path.stat().st_size == sizes[-1]
        keep = data.draw(st.integers(0, sizes[-1] + 9))
        with Metrics(path, keep) as metrics:
            metrics.write("other", step="next")
            whole = max(i for i, size in enumerate(sizes) if size <= keep)
            assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(whole), "next"]
            metrics.back_to(sizes[min(whole, 1)], 1)
            metrics.write("other", step="again")
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [*range(min(whole, 1)), "again"]


def test_a_disk_without_room_for_the_metrics_is_said_with_the_file_and_what_to_do(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny()
    monkeypatch.setattr(Metrics, "_open", lambda *_: io.FileIO("/dev/full", "w"))
    assert main(["pretrain", str(recipe_of(run))]) == 1
    said = f"overnight: [Errno 28] No space left on device: '{run.run_dir / 'metrics.jsonl'}'; make room, and the same command continues\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("damage", ["cut", "emptied", "garbled"])
def test_metrics_of_which_a_part_is_lost_are_said_and_the_training_is_resumed(
    damage: str, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(**{"checkpoint.save_every": 4, "logging.log_every": 1})
    crash_once(monkeypatch, run, 7)
    path = run.run_dir / "metrics.jsonl"
    content = path.read_bytes()
    keep = content.index(b"\n", content.index(b'"global_step": 2')) + 1
    path.write_bytes({"cut": content[: keep + 9], "emptied": b"", "garbled": content[:keep] + bytes(range(128, 256)) * 99}[damage])
    out = finish(run)
    (event,) = (line for line in lines(run, "event") if line["event"] == "metrics_lost")
    assert event["message"] in out and f"the last line of step {0 if damage == 'emptied' else 2}" in out
    # The phase ended with the checkpoint of step 6.
    assert [line["global_step"] for line in lines(run, "train")] == [*([] if damage == "emptied" else [1, 2]), 7, 8, 9, 10]
    assert finish(run).startswith("all phases are done")


def test_metrics_that_were_deleted_after_the_end_are_said_once_and_the_run_stays_finished(tiny: Make) -> None:
    run = tiny()
    finish(run)
    path = run.run_dir / "metrics.jsonl"
    path.unlink()
    with pytest.raises(
        DataError, match=r"metrics\.jsonl: is missing; put it back, or run `overnight pretrain .*` once, which begins another"
    ):
        summarize(run.run_dir)
    assert "has 0 of the" in finish(run)
    content = path.read_bytes()
    assert "bytes that the checkpoint knows" not in finish(run) and path.read_bytes() == content
    found = summarize(run.run_dir)
    assert [(row["name"], row["steps"], row["finished"]) for row in found["phases"]] == [("short", 6, True), ("long", 4, True)]
    assert [note for note in found["notes"] if "metrics" in note or "pretraining" in note] == [
        "metrics.jsonl has lost lines (its event metrics_lost says which): their curves, times and scores are missing here"
    ]


def test_a_second_loss_is_said_too(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(**{"checkpoint.save_every": 4})
    path = run.run_dir / "metrics.jsonl"
    for _ in range(2):  # the second time from the end of the first phase, step 6
        crash_once(monkeypatch, run, 5)
        path.write_bytes(b"".join(line for line in path.read_bytes().splitlines(keepends=True) if b"metrics_lost" in line))
    finish(run)
    assert [line["global_step"] for line in lines(run, "event") if line["event"] == "metrics_lost"] == [4, 6]


def test_what_a_checkpoint_knows_of_the_metrics_is_on_the_disk_before_it(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run, synced = tiny(), []
    real = os.fsync
    monkeypatch.setattr(metrics_module.os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd))
    finish(run)
    first = next(i for i, path in enumerate(synced) if "checkpoints" in path)
    assert str(run.run_dir / "metrics.jsonl") in synced[:first]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_the_numbers_once_also_after_a_resume(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny(**{"logging.tensorboard": True, "checkpoint.save_every": 4})
    crash_once(monkeypatch, run, 7)
    assert len(scalars(run.run_dir / "tensorboard")["train/loss"]) == 6
    finish(run)
    shown = scalars(run.run_dir / "tensorboard")
    for kind, name in (("train", "loss"), ("train", "lr"), ("train", "tokens"), ("eval", "mlm_accuracy")):
        expected = [(line["global_step"], pytest.approx(line[name])) for line in lines(run, kind)]
        assert shown[f"{kind}/{name}"] == expected
    assert "train/step" not in shown


def test_tensorboard_forgets_what_a_run_goes_back_behind(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, 0)
    for step in range(1, 6):
        board.add({"train/loss": step}, step)
    board.back_to(2)
    board.add({"train/loss": 30}, 3)
    board.close()
    assert scalars(tmp_path) == {"train/loss": [(1, 1), (2, 2), (3, 30)]}


@pytest.mark.parametrize(
    ("key", "value", "module", "extra"),
    [("tensorboard", True, "torch.utils.tensorboard", "tensorboard"), ("wandb_project", "mine", "wandb", "wandb")],
)
def test_a_board_that_is_not_installed_is_asked_for(
    key: str, value: object, module: str, extra: str, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"logging\.{key} = .*pip install 'overnight\[{extra}\]'"):
        finish(tiny(**{f"logging.{key}": value}))


def test_no_board_is_written_unasked(tiny: Make) -> None:
    run = tiny()
    finish(run)
    assert not {"tensorboard", "wandb", "wandb.json"} & {path.name for path in run.run_dir.iterdir()}


class Wandb(types.ModuleType):
    """What is used of the package `wandb`, with a server that keeps the runs by their ids."""

    class Error(Exception):
        """As there."""

    def __init__(self, key: bool = True, unreachable: str = "", dies_at: int = -1) -> None:
        super().__init__("wandb")
        self.server: dict[str, dict[int, dict[str, float]]] = {}
        self.begun: list[dict[str, Any]] = []
        self.key, self.unreachable, self.dies_at = key, unreachable, dies_at
        self.Settings = dict

    def login(self, prompt: bool) -> bool:
        assert not prompt, "a training must not wait for an answer"
        return self.key

    def init(self, **given: Any) -> Any:
        if self.unreachable and given["mode"] != "offline":
            raise self.Error(self.unreachable)
        self.begun.append(given)
        history = self.server.setdefault(given["id"], {})

        def log(values: dict[str, float], step: int) -> None:
            if step == self.dies_at:
                raise BrokenPipeError("the service has gone")
            assert step >= max(history, default=0), "steps only grow"
            history.setdefault(step, {}).update(values)
            found.step = step

        found = types.SimpleNamespace(log=log, step=max(history, default=-1) + 1, finish=lambda: None)
        return found


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Wandb]:
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def make(**kind: Any) -> Wandb:
        fake = Wandb(**kind)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return fake

    return make


def test_wandb_gets_the_numbers_of_all_resumes_in_one_run(
    tiny: Make, online: Callable[..., Wandb], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, run = online(), tiny(**{"logging.wandb_project": "mine", "checkpoint.save_every": 4})
    crash_once(monkeypatch, run, 7)
    finish(run)
    finish(run)  # All is done: nothing is begun.
    first, again = fake.begun
    assert first["project"] == "mine" and first["name"] == "tiny" and first["mode"] is None and first["resume"] == "allow"
    assert first["id"] == again["id"] == json.loads((run.run_dir / "wandb.json").read_text())["id"]
    assert first["config"]["model"]["hidden_size"] == 32
    (history,) = fake.server.values()
    for kind in ("train", "eval"):
        for line in lines(run, kind):
            assert history[line["global_step"]][f"{kind}/mlm_loss"] == line["mlm_loss"]
    assert sorted(history) == list(range(1, 11))


def test_a_lost_number_of_the_wandb_run_is_said_with_what_to_do(tiny: Make, online: Callable[..., Wandb]) -> None:
    online()
    run = tiny(**{"logging.wandb_project": "mine"})
    run.run_dir.mkdir()
    (run.run_dir / "wandb.json").write_text("{}")
    with pytest.raises(DataError, match=r"wandb\.json: has no id; delete it, and another run of Weights & Biases is begun"):
        finish(run)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"key": False}, "Weights & Biases: no API key is configured; `wandb login` stores one. Recording offline in "),
        ({"unreachable": "no such host (key sesame-42).\nmore"}, "Weights & Biases: no such host (key ...). Recording offline in "),
    ],
)
def test_wandb_records_offline_without_a_key_or_the_network_and_says_so_without_the_key(
    kind: dict[str, Any], said: str, tiny: Make, online: Callable[..., Wandb], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "sesame-42")
    fake, run = online(**kind), tiny(**{"logging.wandb_project": "mine"})
    told = finish(run)
    assert said in told and "sesame" not in told and "wandb sync" in told
    assert [begun["mode"] for begun in fake.begun] == ["offline"] and len(next(iter(fake.server.values()))) == 10


def test_wandb_mode_is_obeyed_without_asking_for_a_key(tiny: Make, online: Callable[..., Wandb], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = online(key=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    told = finish(tiny(**{"logging.wandb_project": "mine"}))
    assert "Weights" not in told and [begun["mode"] for begun in fake.begun] == [None]


def test_a_training_outlives_wandb(tiny: Make, online: Callable[..., Wandb]) -> None:
    fake, run = online(dies_at=3), tiny(**{"logging.wandb_project": "mine"})
    told = finish(run)
    assert told.count("Weights & Biases: the service has gone. The training continues without it") == 1
    assert sorted(next(iter(fake.server.values()))) == [1, 2] and len(lines(run, "train")) == 10


def test_speed_counts_tokens_operations_and_waiting_since_the_last_line(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    run, sizes = tiny(), Sizes(200, 6000, 30, 8)
    done = StepResult(1, {"mlm": torch.tensor(1.0)}, {"mlm": 30}, torch.tensor(1.0), 0.1, 200, 8, sizes=sizes, waited=0.25)

    def operations(done: StepResult) -> float:
        assert done.sizes is not None
        return training_flops(run.model, 600, done.sizes)

    for processes in (1, 4):
        peak = Peak(1e9 * processes, measured=True)
        meter, progress = Throughput(run.phases, 0, World(size=processes), operations, peak), TrainingProgress(phase="short")
        for _ in range(2):
            now[0] += 2.0
            meter.note(done, progress, wait=False)
        flops = training_flops(run.model, 600, sizes)
        expected = {
            "tokens_per_s": 100.0,
            "sequences_per_s": 4.0,
            "mfu": round(flops / 2 / (1e9 * processes), 4),
            "data_wait_fraction": 0.125,
        }
        assert meter.rate() == expected
        now[0] += 100.0
        meter.pause()
        now[0] += 1.0
        meter.note(done, progress, wait=False)
        assert meter.rate()["tokens_per_s"] == 200.0


def test_there_is_no_share_of_a_peak_that_the_products_exceed(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "device_peak", lambda *_: Peak(1e3, measured=True))
    run = tiny()
    told = finish(run)
    assert told.count("above the peak of 0.00 TFLOP/s, measured, so that is not the peak") == 1 and "MFU" not in told.replace("no MFU", "")
    assert not any("mfu" in line for line in lines(run, "train"))
    assert [line["event"] for line in lines(run, "event")].count("peak") == 1


def test_peaks_of_processes_add_up_and_one_that_is_unknown_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(numbers: dict[str, float], world: World) -> dict[str, float]:
        return {name: 2 * number for name, number in numbers.items()}

    monkeypatch.setattr(throughput, "all_reduce_sums", twice)
    assert throughput.peak_of_all(Peak(1e9, measured=True), World(size=2)) == Peak(2e9, measured=True)
    assert throughput.peak_of_all(None, World(size=2)) is None


def test_a_run_writes_what_it_used_of_the_device_and_how_long_it_waited(tiny: Make) -> None:
    run = tiny()
    finish(run)
    assert all(line["mfu"] > 0 and 0 <= line["data_wait_fraction"] <= 1 for line in lines(run, "train"))


def test_a_slow_loader_is_seen(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    late, clock = [0.0], time.perf_counter

    def slow(make: Callable[[int], Any], start: int, stop: int) -> Iterator[Any]:
        for step in range(start, stop):
            late[0] += 10.0
            yield make(step)

    monkeypatch.setattr(loop, "prefetch", slow)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock() + late[0])
    run = tiny()
    finish(run)
    assert all(line["data_wait_fraction"] > 0.9 for line in lines(run, "train"))
