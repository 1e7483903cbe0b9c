"""A checkpoint gives back every bit, in its type, and is never a half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from overnight.config import Optim
from overnight.errors import DataError
from overnight.optim.groups import build_optimizer
from overnight.train import checkpoint
from overnight.train.checkpoint import Progress


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


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_model_and_optimizer_come_back_bit_by_bit_and_go_on_alike(name: str, tmp_path: Path) -> None:
    model = network()
    optimizer = build_optimizer(model, Optim(name=name, lr=0.01))
    steps(model, optimizer, 3)
    progress = Progress(phase="short", step=3, global_step=13, tokens=7, seconds=0.1 + 0.2, running={"mlm": [1 / 3, 2]})
    checkpoint.save(tmp_path, model, optimizer, progress, keep=3)

    again = network(seed=1)
    loaded = checkpoint.load(tmp_path, again)
    assert loaded is not None
    restored, moments, problems = loaded
    assert restored == progress and problems == []
    other = build_optimizer(again, Optim(name=name, lr=0.01))
    checkpoint.restore_optimizer(other, moments)
    mine, theirs = checkpoint.optimizer_tensors(optimizer), checkpoint.optimizer_tensors(other)
    assert mine.keys() == theirs.keys() and len(mine) == 6 * 3
    for key in mine:
        assert mine[key].dtype == theirs[key].dtype and torch.equal(mine[key], theirs[key]), key
    steps(model, optimizer, 4, first=3)
    steps(again, other, 4, first=3)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_counts_restart_and_moments_stay(name: str) -> None:
    model = network()
    optimizer = build_optimizer(model, Optim(name=name))
    steps(model, optimizer, 3)
    moments = checkpoint.optimizer_tensors(optimizer)
    fresh = build_optimizer(model, Optim(name=name))
    checkpoint.restore_optimizer(fresh, moments, restart_count=True)
    counts = 0
    for key, value in checkpoint.optimizer_tensors(fresh).items():
        if key.endswith("/step"):
            assert moments[key] == 3 and value == 0
            counts += 1
        else:
            assert torch.equal(value, moments[key]) and value.abs().sum() > 0
    assert counts == 6


def test_fp32_moments_of_bf16_parameters_stay_fp32() -> None:
    model = network(dtype=torch.bfloat16)
    optimizer = build_optimizer(model, Optim(name="lamb"))
    steps(model, optimizer, 2)
    moments = checkpoint.optimizer_tensors(optimizer)
    assert {value.dtype for key, value in moments.items() if not key.endswith("/step")} == {torch.float32}
    fresh = build_optimizer(model, Optim(name="lamb"))
    checkpoint.restore_optimizer(fresh, moments)
    for key, value in checkpoint.optimizer_tensors(fresh).items():
        assert value.dtype == moments[key].dtype and torch.equal(value, moments[key]), key


def test_restored_moments_are_not_shared_with_what_was_loaded() -> None:
    model = network()
    optimizer = build_optimizer(model, Optim(name="lamb"))
    steps(model, optimizer, 1)
    moments = {key: value.clone() for key, value in checkpoint.optimizer_tensors(optimizer).items()}
    before = {key: value.clone() for key, value in moments.items()}
    fresh = build_optimizer(model, Optim(name="lamb"))
    checkpoint.restore_optimizer(fresh, moments)
    steps(model, fresh, 2)
    assert all(torch.equal(before[key], moments[key]) for key in moments)


def saved(folder: Path, global_step: int, keep: int = 3) -> Path:
    model = network()
    return checkpoint.save(folder, model, build_optimizer(model, Optim()), Progress(global_step=global_step), keep)


def test_the_last_are_kept_and_latest_names_the_newest(tmp_path: Path) -> None:
    for step in (1, 5, 20, 100):
        saved(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-0000020", "step-0000100"]
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest.name == (tmp_path / "latest").read_text() == "step-0000100"
    assert checkpoint.newest(tmp_path / "absent") is None


def test_what_a_killed_save_left_is_not_read_and_goes_away(tmp_path: Path) -> None:
    left = tmp_path / ".step-0000009.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert checkpoint.newest(tmp_path) is None and checkpoint.load(tmp_path, network()) is None
    saved(tmp_path, 10)
    assert not left.exists()


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    place = saved(tmp_path, 1)
    state = json.loads((place / "state.json").read_text())
    (place / "state.json").write_text(json.dumps({**state, "version": 99}))
    with pytest.raises(DataError, match="format version 99, this program reads 1"):
        checkpoint.read(place)


def test_a_checkpoint_of_another_model_is_refused_and_left(tmp_path: Path) -> None:
    place = saved(tmp_path, 1)
    with pytest.raises(DataError, match="belongs to another model"):
        checkpoint.load(tmp_path, nn.Linear(3, 3))
    assert checkpoint.read(place)[0].global_step == 1
