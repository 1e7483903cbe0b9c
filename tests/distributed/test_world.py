"""Which device a process takes, and what it says where it cannot join the others or loses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from overnight import config
from overnight.config import Run
from overnight.config.machine import Compute
from overnight.distributed import world
from overnight.errors import ConfigError, UserError
from tests.conftest import tiny_tree

NCCL = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000
Exception raised from create at /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Of process 1 of 2, which nothing started."""
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return config.build_run(tiny_tree(Path("data"), Path("out")))


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fail(*args: Any, **settings: Any) -> NoReturn:
        raise error

    return fail


def said(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, later: bool) -> str:
    """What the user reads of an error that comes in joining, or later."""
    if later:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(world, "_store", lambda world: None)
    monkeypatch.setattr(dist, "init_process_group", raising(error))
    with pytest.raises(UserError) as found, world.process_group(run):
        raise error
    return str(found.value)


@pytest.mark.parametrize("later", [False, True])
def test_what_nccl_says_reaches_the_user_without_the_frames_behind_it(later: bool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(run, monkeypatch, dist.DistBackendError(NCCL), later)
    assert "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000" in text
    assert "NCCL_DEBUG=WARN in the environment" in text
    assert "frame #0" not in text and "5 minutes" not in text


@pytest.mark.parametrize(
    "error",
    [
        dist.DistNetworkError("The client socket has failed to connect"),
        dist.DistStoreError("wait timeout after 300000ms"),
        dist.DistBackendError("store->get('0') got error: Connection reset by peer"),
        RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
    ],
)
def test_a_process_that_has_gone_is_said_to_be_lost(error: Exception, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "did not find all others at 127.0.0.1:1 within 5 minutes, or lost one" in said(run, monkeypatch, error, later=False)
    assert "process 1 lost another process" in said(run, monkeypatch, error, later=True)


def anywhere(run: Run) -> Run:
    return replace(run, compute=Compute(device="auto"))


def test_each_process_takes_its_own_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert world.device_of(anywhere(run)) == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"LOCAL_RANK = 2: only 2 GPUs can be seen by torch; start at most 2 processes on a machine"):
        world.device_of(anywhere(run))


def test_a_process_that_is_shown_one_gpu_takes_it_unless_the_launcher_shows_it_to_all(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert world.device_of(anywhere(run)) == torch.device("cuda", 0)  # srun --gpus-per-task=1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun and overnight launch
    with pytest.raises(ConfigError, match=r"LOCAL_RANK = 1: only 1 GPU can be seen by torch; start at most 1 process on a machine"):
        world.device_of(anywhere(run))
