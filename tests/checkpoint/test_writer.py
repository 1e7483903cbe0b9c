"""A checkpoint is of the moment it was taken at, is read back before it counts, and whatever fails a whole one is there."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight.checkpoint import reader, writer
from overnight.checkpoint.reader import TrainingProgress
from overnight.checkpoint.writer import CheckpointWriter
from overnight.config import LambConfig, Run
from overnight.errors import DataError, UserError
from overnight.optim.groups import build_optimizer
from tests.checkpoint.test_reader import network, saved, steps

Make = Callable[..., Run]


class Training:
    """A small network and its optimizer, and checkpoints of them."""

    def __init__(self, device: str = "cpu") -> None:
        self.model = network().to(device)
        self.optimizer = build_optimizer(self.model, LambConfig(lr=0.01))
        self.progress = TrainingProgress(states={"metrics": {"mlm": [0.5, 1]}})

    def step(self) -> None:
        steps(self.model, self.optimizer, 1, self.progress.global_step)
        self.progress.global_step += 1
        self.progress.states["metrics"]["mlm"][0] += 0.25

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {**self.model.state_dict(), **reader.optimizer_tensors(self.optimizer)}
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def content(place: Path) -> dict[str, torch.Tensor]:
    _, model, optimizer = reader.read_checkpoint(place)
    return {**model, **optimizer}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Gate:
    """Holds the writer where it begins to write tensors, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open, real = threading.Event(), threading.Event(), writer.save_file

        def held(*args: Any) -> None:
            self.reached.set()
            assert self.open.wait(60)
            real(*args)

        monkeypatch.setattr(writer, "save_file", held)


def test_a_checkpoint_is_of_the_step_it_was_taken_at_though_the_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, training = Gate(monkeypatch), Training()
    with CheckpointWriter(tmp_path, keep=3) as saver:
        training.step()
        then = training.state()
        saver.save(training.model, training.optimizer, training.progress)
        assert gate.reached.wait(60) and saver.busy
        training.step()
        assert not equal(then, training.state())
        assert reader.newest_checkpoint(tmp_path) is None
        gate.open.set()
    assert equal(content(tmp_path / "step-0000001"), then)
    assert reader.read_checkpoint(tmp_path / "step-0000001")[0] == TrainingProgress(global_step=1, states={"metrics": {"mlm": [0.75, 1]}})


def test_the_next_save_waits_for_the_one_in_flight_and_uses_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, training, states = Gate(monkeypatch), Training(), {}
    with CheckpointWriter(tmp_path, keep=3) as saver:
        training.step()
        states[1] = training.state()
        saver.save(training.model, training.optimizer, training.progress)
        memory = {tensor.data_ptr() for named in saver._copies.values() for tensor in named.values()}
        training.step()
        states[2] = training.state()
        second = threading.Thread(target=saver.save, args=(training.model, training.optimizer, training.progress))
        second.start()
        second.join(0.05)
        assert second.is_alive() and sorted(p.name for p in tmp_path.iterdir()) == [".step-0000001.tmp"]
        gate.open.set()
        second.join()
        assert {tensor.data_ptr() for named in saver._copies.values() for tensor in named.values()} == memory
    assert all(equal(content(tmp_path / f"step-{step:07d}"), states[step]) for step in (1, 2))


def test_without_asynchronous_the_checkpoint_is_whole_when_save_returns(tmp_path: Path) -> None:
    training = Training()
    saver = CheckpointWriter(tmp_path, keep=3, asynchronous=False)
    began = time.perf_counter()
    assert 0 < saver.save(training.model, training.optimizer, training.progress) <= time.perf_counter() - began
    assert not saver.busy and saver._copies == {} and (tmp_path / "latest").read_text() == "step-0000000"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_are_copied_to_pinned_memory_and_come_back(tmp_path: Path) -> None:
    from overnight.distributed.world import World

    training = Training("cuda")
    with CheckpointWriter(tmp_path, keep=3, world=World(device=torch.device("cuda"))) as saver:
        saver.save(training.model, training.optimizer, training.progress)
        then = training.state()
        assert all(tensor.is_pinned() for tensor in saver._copies["model"].values())
        with torch.no_grad():
            for p in training.model.parameters():
                p.add_(1)
    assert equal(content(tmp_path / "step-0000000"), then)


def failing(error: Exception) -> Callable[..., None]:
    def write(*args: Any) -> None:
        raise error

    return write


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("error", [DataError("checkpoint x could not be written"), ZeroDivisionError("ours")])
def test_an_error_of_the_writer_is_raised_once_and_the_next_save_works(
    error: Exception, asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    for next_call in ("save", "wait", "__exit__"):
        saver = CheckpointWriter(tmp_path, keep=9, asynchronous=asynchronous)
        saver.save(training.model, training.optimizer, training.progress)
        training.step()
        with monkeypatch.context() as patch, pytest.raises(type(error), match=str(error)):
            patch.setattr(writer, "write_checkpoint", failing(error))
            saver.save(training.model, training.optimizer, training.progress)
            saver.settle()
            assert saver.error is error
            arguments = {"save": (training.model, training.optimizer, training.progress), "__exit__": (None, None, None)}
            getattr(saver, next_call)(*arguments.get(next_call, ()))
        before = f"step-{training.progress.global_step - 1:07d}"
        newest = reader.newest_checkpoint(tmp_path)
        assert saver.error is None and newest is not None and newest.name == (tmp_path / "latest").read_text() == before
        saver.save(training.model, training.optimizer, training.progress)
        saver.wait()
        assert reader.read_checkpoint(tmp_path / f"step-{training.progress.global_step:07d}")[0] == training.progress


def test_another_error_waits_for_the_writer_and_neither_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    with pytest.raises(UserError, match="the first"), CheckpointWriter(tmp_path, keep=9) as saver:
        saver.save(training.model, training.optimizer, training.progress)
        raise UserError("the first")
    assert reader.newest_checkpoint(tmp_path) == tmp_path / "step-0000000"
    monkeypatch.setattr(writer, "write_checkpoint", failing(DataError("no room")))
    for error, told in ((UserError("the first"), "the first"), (OSError(errno.ENOSPC, "full"), "no room")):
        with pytest.raises((UserError, OSError)) as caught, CheckpointWriter(tmp_path, keep=9) as saver:
            saver.save(training.model, training.optimizer, training.progress)
            raise error
        # A disk that is full fails both; the checkpoint's error says what to do.
        assert str(caught.value) == told and "no room" in [told, *getattr(caught.value, "__notes__", ())]


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, training = Gate(monkeypatch), Training()
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path, keep=9) as saver:
        saver.save(training.model, training.optimizer, training.progress)
        raise KeyboardInterrupt
    assert saver.busy
    gate.open.set()
    saver.settle()


@pytest.mark.parametrize("part", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("where", [0.1, 0.95])
def test_what_reads_back_other_than_written_does_not_count(
    part: str, where: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 2)
    before = content(tmp_path / "step-0000001")

    def faulty(path: Path) -> None:
        if path.name == part:
            data = bytearray(path.read_bytes())
            data[int(where * len(data))] ^= 1
            path.write_bytes(data)

    monkeypatch.setattr(writer, "_from_disk", faulty)
    with pytest.raises(DataError, match=r"step-0000003 could not be written: .*; step-0000002 before it is untouched\. .* and run again"):
        saved(tmp_path, 3, keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-0000001", "step-0000002"]
    assert (tmp_path / "latest").read_text() == "step-0000002" and equal(content(tmp_path / "step-0000002"), before)


def test_what_is_not_a_number_is_read_back_as_it_is(tmp_path: Path) -> None:
    training = Training()
    training.step()
    state = next(iter(training.optimizer.state.values()))
    state["exp_avg"].fill_(torch.nan)
    with CheckpointWriter(tmp_path, keep=1) as saver:
        saver.save(training.model, training.optimizer, training.progress)
    assert sum(int(tensor.isnan().any()) for tensor in content(tmp_path / "step-0000001").values()) == 1


def test_the_last_are_kept_and_latest_names_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, 1, 5, 20, 100, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-0000020", "step-0000100"]
    newest = reader.newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == (tmp_path / "latest").read_text() == "step-0000100"


@given(
    taken=st.lists(st.integers(1, 60), min_size=1, unique=True).map(sorted),
    keep=st.integers(1, 4),
    every=st.integers(0, 20),
    before=st.none() | st.integers(1, 60),
)
def test_the_newest_the_first_of_every_stretch_and_the_last_before_a_decay_are_kept(
    taken: list[int], keep: int, every: int, before: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    for step in taken:
        (folder / f"step-{step:07d}").mkdir()
        # A decay is decided once it begins.
        writer.prune(folder, step, keep, every, before if before is not None and step >= before else None)
    first = {min(s for s in taken if s // every == k) for k in {s // every for s in taken} - {0}} if every else set()
    last = {max((s for s in taken if s <= before), default=taken[-1])} if before is not None and taken[-1] >= before else set()
    assert {reader.step_of(place) for place in reader.list_checkpoints(folder)} == set(taken[-keep:]) | first | last


def test_what_a_killed_save_left_is_not_read_and_goes_away(tmp_path: Path) -> None:
    left = tmp_path / ".step-0000009.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert reader.newest_checkpoint(tmp_path) is None and reader.load_checkpoint(tmp_path, network()) is None
    saved(tmp_path, 10)
    assert not left.exists()


def test_what_was_passed_over_goes_away_once_a_new_one_is_whole(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        (tmp_path / f"step-{step:07d}" / "state.json").unlink()
    saved(tmp_path, 3, keep=2)
    assert [place.name for place in reader.list_checkpoints(tmp_path)] == ["step-0000003", "step-0000002"]
    assert reader.load_checkpoint(tmp_path, network()) is not None


class Killed(BaseException):
    """What stands for the end of the process at some point: nothing catches it to clear up."""


CALLS = ("mkdir", "rename", "unlink", "rmdir", "fsync", "open", "posix_fadvise")


@contextmanager
def watched(seen: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it, `seen` is called before everything that changes the disk."""
    inside = False

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if not inside:
                inside = True
                try:
                    seen(name)
                finally:
                    inside = False
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        patch.setattr(writer, "save_file", wrap("save_file", writer.save_file))
        patch.setattr(Path, "write_text", wrap("write_text", Path.write_text))
        yield


def two_and_a_third(folder: Path) -> int:
    saved(folder, 1, 2)
    return 3


def the_same_again(folder: Path) -> int:
    saved(folder, 2)
    return 2


def over_a_damaged_one(folder: Path) -> int:
    (saved(folder, 1, 3) / "model.safetensors").write_bytes(b"")
    return 3


def after_a_kill_between_two_names(folder: Path) -> int:
    saved(folder, 2).rename(folder / "step-0000002.old")
    return 2


@pytest.mark.parametrize("before", [two_and_a_third, the_same_again, over_a_damaged_one, after_a_kill_between_two_names])
def test_whatever_fails_and_wherever_a_whole_checkpoint_is_there(
    before: Callable[[Path], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # Slow, and no power fails here.
    training = Training()
    for _ in range(3):
        training.step()
    training.progress.global_step = before(tmp_path / "before")
    new = training.state()

    def save(folder: Path, seen: Callable[[int], None]) -> int:
        """Save in a copy of what was before; `seen` is told before which change of the disk, from 1."""
        shutil.copytree(tmp_path / "before", folder, symlinks=True)
        count = 0

        def count_on(name: str) -> None:
            nonlocal count
            count += 1
            seen(count)

        with watched(count_on, monkeypatch):
            CheckpointWriter(folder, keep=1, asynchronous=False).save(training.model, training.optimizer, training.progress)
        return count

    def see_whole(folder: Path) -> None:
        loaded = reader.load_checkpoint(folder, network())
        assert loaded is not None and loaded[0].global_step in (1, 2, 3)

    changes = save(tmp_path / "undisturbed", lambda at: see_whole(tmp_path / "undisturbed"))
    assert 25 < changes < 100
    for at, error in product(range(1, changes + 1), (OSError(errno.EIO, "Input/output error"), Killed())):

        def fail(now: int, at: int = at, error: BaseException = error) -> None:
            if now == at:
                raise error

        folder = tmp_path / f"{at}-{type(error).__name__}"
        try:
            save(folder, fail)
        except DataError as caught:
            assert "could not be written" in str(caught) and "Input/output error" in str(caught) and not list(folder.glob(".step-*"))
        except Killed:
            pass
        see_whole(folder)
        with CheckpointWriter(folder, keep=1) as saver:
            saver.save(training.model, training.optimizer, training.progress)
        assert sorted(p.name for p in folder.iterdir()) == ["latest", f"step-{training.progress.global_step:07d}"]
        assert equal(content(folder / f"step-{training.progress.global_step:07d}"), new)
        shutil.rmtree(folder)


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    told = r"step-0000002 could not be written: .*No space left on device; step-0000001 before it is untouched. It takes 0.3 MB, and 0.0 MB are free"
    with pytest.raises(DataError, match=told):
        saved(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-0000001"]
