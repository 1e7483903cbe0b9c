"""What the tests of Triton's kernels share: when they can run, and what a worker in a process of its own finds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.conftest import ROOT
from tests.forks import Forks
from tests.processes import HANG

MISSING = importlib.util.find_spec("triton") is None or sys.platform != "linux"
OLD = MISSING or Version(importlib.metadata.version("triton")) < Version("3.7")
needs_triton = pytest.mark.skipif(MISSING, reason="needs Triton, with its assembler for Linux")
needs_interpreter = pytest.mark.skipif(OLD, reason="needs Triton 3.7: NumPy 2.4 breaks the interpreters before")
needs_gpu = pytest.mark.skipif(MISSING or not torch.cuda.is_available(), reason="needs a CUDA device and Triton")


@contextmanager
def interpreting(folder: Path) -> Iterator[Callable[..., Any]]:
    """Give what returns what a worker's kernels compute when numpy interprets them, which is settled when Triton is imported."""
    forks = Forks(
        ["torch", "triton", "overnight.models.bert", "overnight.optim"], folder, ["-W", "error"], _environment(TRITON_INTERPRET="1")
    )

    def found(worker: str, what: str = "interpret") -> Any:
        code, said = forks.run("tests.interpreter", f"tests.{worker}", what, str(folder / "found.pt"))
        assert code == 0, said[-3000:]
        return torch.load(folder / "found.pt", weights_only=True)

    with closing(forks):
        yield found


def compiled_by(worker: str, folder: Path) -> Any:
    """What its kernels are compiled to for GPUs that need not be there; nothing of an earlier run is taken."""
    command = [sys.executable, "-W", "error", "-m", f"tests.{worker}", "compile", str(folder / "found.pt")]
    env = _environment(TRITON_CACHE_DIR=str(folder))
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt", weights_only=True)


def _environment(**more: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")} | more
