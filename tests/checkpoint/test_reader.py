"""A checkpoint gives back every bit, in its type; one that is damaged, foreign or from another program is told, never taken."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from overnight.checkpoint import reader
from overnight.checkpoint.reader import CorruptCheckpoint, TrainingProgress
from overnight.checkpoint.writer import CheckpointWriter
from overnight.config import OPTIMIZERS, LambConfig
from overnight.errors import DataError
from overnight.optim.groups import build_optimizer


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, first + count):
        torch.manual_seed(100 + step)
        model(torch.randn(3, 4, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: Path, *global_steps: int, name: str = "adamw", keep: int = 9) -> Path:
    """Checkpoints of one network at some steps; returns the last."""
    model = network()
    optimizer = build_optimizer(model, OPTIMIZERS[name](lr=0.01))
    steps(model, optimizer, 1)
    with CheckpointWriter(folder, keep=keep) as saver:
        for step in global_steps:
            saver.save(model, optimizer, TrainingProgress(global_step=step, states={"metrics": {"mlm": [step / 3, 1]}}))
    return folder / f"step-{global_steps[-1]:07d}"


@pytest.mark.parametrize("name", ["adamw", "lamb", "lans", "lars", "muon"])
def test_model_and_optimizer_come_back_bit_by_bit_and_go_on_alike(name: str, tmp_path: Path) -> None:
    model = network()
    optimizer = build_optimizer(model, OPTIMIZERS[name](lr=0.01))
    steps(model, optimizer, 3)
    progress = TrainingProgress(phase="short", step=3, global_step=13, tokens=7, seconds=0.1 + 0.2, states={"metrics": {"mlm": [1 / 3, 2]}})
    with CheckpointWriter(tmp_path, keep=3) as saver:
        saver.save(model, optimizer, progress)

    again = network(seed=1)
    loaded = reader.load_checkpoint(tmp_path, again)
    assert loaded is not None
    restored, moments, problems = loaded
    assert restored == progress and problems == []
    other = build_optimizer(again, OPTIMIZERS[name](lr=0.01))
    reader.restore_optimizer(other, moments)
    mine, theirs = reader.optimizer_tensors(optimizer), reader.optimizer_tensors(other)
    assert mine.keys() == theirs.keys() and len(mine) >= 6
    for key in mine:
        assert mine[key].dtype == theirs[key].dtype and torch.equal(mine[key], theirs[key]), key
    steps(model, optimizer, 4, first=3)
    steps(again, other, 4, first=3)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_counts_restart_and_moments_stay(name: str) -> None:
    model = network()
    optimizer = build_optimizer(model, OPTIMIZERS[name]())
    steps(model, optimizer, 3)
    moments = reader.optimizer_tensors(optimizer)
    fresh = build_optimizer(model, OPTIMIZERS[name]())
    reader.restore_optimizer(fresh, moments, restart_count=True)
    counts = 0
    for key, value in reader.optimizer_tensors(fresh).items():
        if key.endswith("/step"):
            assert moments[key] == 3 and value == 0
            counts += 1
        else:
            assert torch.equal(value, moments[key]) and value.abs().sum() > 0
    assert counts == 6


def test_fp32_moments_of_bf16_parameters_stay_fp32() -> None:
    model = network(dtype=torch.bfloat16)
    optimizer = build_optimizer(model, LambConfig())
    steps(model, optimizer, 2)
    moments = reader.optimizer_tensors(optimizer)
    assert {value.dtype for key, value in moments.items() if not key.endswith("/step")} == {torch.float32}
    fresh = build_optimizer(model, LambConfig())
    reader.restore_optimizer(fresh, moments)
    for key, value in reader.optimizer_tensors(fresh).items():
        assert value.dtype == moments[key].dtype and torch.equal(value, moments[key]), key


def test_restored_moments_are_not_shared_with_what_was_loaded() -> None:
    model = network()
    optimizer = build_optimizer(model, LambConfig())
    steps(model, optimizer, 1)
    moments = {key: value.clone() for key, value in reader.optimizer_tensors(optimizer).items()}
    before = {key: value.clone() for key, value in moments.items()}
    fresh = build_optimizer(model, LambConfig())
    reader.restore_optimizer(fresh, moments)
    steps(model, fresh, 2)
    assert all(torch.equal(before[key], moments[key]) for key in moments)


def test_carried_state_comes_back_and_its_damage_is_seen(tmp_path: Path) -> None:
    model = network()
    optimizer = build_optimizer(model, LambConfig())
    carry = {"hidden": torch.randn(3, 5), "cell": torch.randn(3, 5, dtype=torch.float64)}
    with CheckpointWriter(tmp_path, keep=3) as saver:
        saver.save(model, optimizer, TrainingProgress(global_step=1))
        saver.save(model, optimizer, TrainingProgress(global_step=2), carry)
    found: dict[str, torch.Tensor] = {}
    assert reader.load_checkpoint(tmp_path, model, found) is not None
    assert found.keys() == carry.keys() and all(torch.equal(found[name], carry[name]) for name in carry)

    part = tmp_path / "step-0000002" / "carry.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    found = {}
    loaded = reader.load_checkpoint(tmp_path, model, found)
    assert loaded is not None and loaded[0].global_step == 1 and found == {}
    assert loaded[2] == [f"{part} was cut short or changed: its checksum differs"]


def test_a_checkpoint_of_another_format_version_is_refused_with_both(tmp_path: Path) -> None:
    place = saved(tmp_path, 7)
    tree = json.loads((place / "state.json").read_text())
    (place / "state.json").write_text(json.dumps(tree | {"version": 1}))
    with pytest.raises(
        DataError, match="step-0000007 has format version 1, but this program reads 2; continue with the version of overnight that wrote it"
    ):
        reader.load_checkpoint(tmp_path, network(seed=1))


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """What changes a `state.json` and its checksum, as another program would have written it."""

    def edit(place: Path) -> None:
        tree = json.loads((place / "state.json").read_text())
        del tree["checksums"]["progress"]
        (place / "state.json").write_text(json.dumps(change(tree) or tree))

    return edit


def removed(name: str) -> Callable[[Path], None]:
    return lambda place: (place / name).unlink()


def emptied(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def made_a_file(place: Path) -> None:
    shutil.rmtree(place)
    place.write_text("stray")


def dangling(place: Path) -> None:
    shutil.rmtree(place)
    place.symlink_to("nowhere")


def moved_counter(place: Path) -> None:
    path = place / "state.json"
    path.write_text(path.read_text().replace('"tokens": 0', '"tokens": 8'))


def foreign_part(place: Path) -> None:
    shutil.copyfile(place / "model.safetensors", place / "optimizer.safetensors")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (removed("model.safetensors"), "model.safetensors is missing"),
        (removed("optimizer.safetensors"), "optimizer.safetensors is missing"),
        (removed("state.json"), "state.json is missing"),
        (emptied, "is incomplete: "),
        (made_a_file, "step-0000002 is not a folder; move it away"),
        (dangling, "step-0000002 is incomplete: "),
        (foreign_part, "optimizer.safetensors was cut short or changed: its checksum differs"),
        (moved_counter, "state.json was changed: the checksum of its counters differs"),
        (lambda place: (place / "state.json").write_text("{"), "state.json is not JSON: "),
        (lambda place: (place / "state.json").write_bytes(b"\xff\xfe"), "state.json is not JSON: "),
        (lambda place: (place / "state.json").write_text("[" * 100_000), "state.json is not JSON: "),
        (lambda place: (place / "state.json").write_text("[1]"), "state.json was changed: it has no version"),
        (edited(lambda tree: {**tree, "version": "1"}), "state.json was changed: it has no version"),
        (edited(lambda tree: {**tree, "progress": 3}), "state.json: progress: "),
        (edited(lambda tree: tree["progress"].update(step="3")), "state.json: progress.step: Input should be a valid integer"),
        (edited(lambda tree: tree["progress"].update(step=3.5)), "state.json: progress.step: "),
        (edited(lambda tree: tree["progress"].update(states={"mlm": 1})), "state.json: progress.states.mlm: "),
        (edited(lambda tree: tree["checksums"].update(model=None)), "state.json: checksums.model: "),
        (edited(lambda tree: tree["checksums"].pop("model") and None), "state.json has no checksum of model"),
        (edited(lambda tree: {k: v for k, v in tree.items() if k != "checksums"}), "state.json: checksums: Field required"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_told(damage: Callable[[Path], Any], told: str, tmp_path: Path) -> None:
    place = saved(tmp_path, 1, 2)
    damage(place)
    loaded = reader.load_checkpoint(tmp_path, network(seed=1))
    assert loaded is not None
    progress, _, problems = loaded
    assert progress.global_step == 1
    assert len(problems) == 1 and str(place) in problems[0] and told in problems[0], problems
    with pytest.raises(CorruptCheckpoint):
        reader.read_checkpoint(place)
    shutil.rmtree(tmp_path / "step-0000001")
    with pytest.raises(DataError, match=f"no checkpoint is whole:\n.*\nDelete {tmp_path} to begin again"):
        reader.load_checkpoint(tmp_path, network(seed=1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("whole"), 1)


@given(data=st.data())
def test_no_changed_bit_of_a_checkpoint_goes_unseen(data: st.DataObject, whole: Path) -> None:
    before = reader.read_checkpoint(whole)[0]
    path = whole / data.draw(st.sampled_from(["model.safetensors", "optimizer.safetensors", "state.json"]))
    content = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
    try:
        # Only white space in the JSON may change.
        assert reader.read_checkpoint(whole)[0] == before and path.name == "state.json"
    except DataError:
        pass
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda tree: {**tree, "version": 99},
            "step-0000002 has format version 99, but this program reads 2; continue with the version of overnight that wrote it",
        ),
        (
            lambda tree: tree["progress"].update(later=1),
            "progress.later, which this program does not know; continue with the version of overnight that wrote it",
        ),
        (lambda tree: {**tree, "later": 1}, "has later, which this program does not know"),
    ],
)
def test_a_checkpoint_of_a_newer_program_is_refused_not_passed_over(change: Any, told: str, tmp_path: Path) -> None:
    place = saved(tmp_path, 1, 2)
    edited(change)(place)
    with pytest.raises(DataError, match=told):
        reader.load_checkpoint(tmp_path, network())
    assert place.exists()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (nn.Linear(3, 3), r"weight: absent there, float32 \[3, 3\] here; bias: absent there, float32 \[3\] here; 0.bias: .*; and 5 more"),
        (nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)), r"2.weight: float32 \[2, 8\] there, float32 \[3, 8\] here; 2.b"),
        (
            nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)),
            r"2.bias: float32 \[2\] there, absent here; 2.weight: float32 \[2, 8\] there, absent here",
        ),
        (network(dtype=torch.bfloat16), r"0.weight: float32 \[8, 4\] there, bfloat16 \[8, 4\] here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_changed(other: nn.Module, told: str, tmp_path: Path) -> None:
    place = saved(tmp_path, 1)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(DataError, match=f"{place} belongs to another model: {told}"):
        reader.load_checkpoint(tmp_path, other)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    assert reader.read_checkpoint(place)[0].global_step == 1


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"9.weight/exp_avg": torch.zeros(2)}, "state 9.weight/exp_avg is of a parameter that this network does not have"),
        ({"0.bias/exp_avg": torch.zeros(9)}, r"state 0.bias/exp_avg is of shape \(9,\), the parameter of \(8,\)"),
    ],
)
def test_the_state_of_another_networks_optimizer_is_refused(tensors: dict[str, torch.Tensor], told: str) -> None:
    optimizer = build_optimizer(network(), LambConfig())
    with pytest.raises(DataError, match=told):
        reader.restore_optimizer(optimizer, {"0.bias/step": torch.tensor(3.0), **tensors})
    assert reader.optimizer_tensors(optimizer) == {}


def test_the_step_decides_which_is_newest_not_a_clock_nor_the_alphabet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: -1e9)
    saved(tmp_path, 9_999_999, 10_000_000)
    for age, name in enumerate(("step-10000000", "step-9999999")):
        for path in (tmp_path / name, *(tmp_path / name).iterdir()):
            os.utime(path, (age * 1e9, age * 1e9))
    newest = reader.newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-10000000"
    loaded = reader.load_checkpoint(tmp_path, network())
    assert loaded is not None and loaded[0].global_step == 10_000_000


def test_what_has_no_checkpoints_name_is_left_alone(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    strays = ["step-latest", "step-1", "step-0000003.bak", "notes.txt", "step-0000004.tar"]
    for name in strays:
        (tmp_path / name).mkdir()
    assert [place.name for place in reader.list_checkpoints(tmp_path)] == ["step-0000001"]
    saved(tmp_path, 5, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {*strays, "latest", "step-0000005"}
    assert reader.list_checkpoints(tmp_path / "absent") == [] and reader.newest_checkpoint(tmp_path / "absent") is None


def test_a_link_to_a_checkpoint_is_read_and_never_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    saved(tmp_path / "checkpoints", 1, 2)
    shutil.move(tmp_path / "checkpoints" / "step-0000002", elsewhere)
    link = tmp_path / "checkpoints" / "step-0000002"
    link.symlink_to(elsewhere)
    loaded = reader.load_checkpoint(tmp_path / "checkpoints", network())
    assert loaded is not None and loaded[0].global_step == 2
    saved(tmp_path / "checkpoints", 3, 4, keep=1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-0000002", "step-0000004"]
    assert reader.read_checkpoint(elsewhere)[0].global_step == 2
    with pytest.raises(DataError, match="step-0000002 is not a checkpoint folder, and is in the way: move it away"):
        saved(tmp_path / "checkpoints", 2)
    assert reader.read_checkpoint(link)[0].global_step == 2
