"""Workers in processes of their own, where torch believes in a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.gpu.fake_cuda import Missing, guard
from tests.processes import HANG

TORCH = "2.13."
"""That of constraints.txt; another may have other internals, and Inductor other kernels."""


@pytest.fixture(scope="session")
def on_fake_gpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs a worker of this folder and returns what it found."""
    if not version("torch").startswith(TORCH):
        pytest.skip(
            f"NOT TESTED: the GPU path, since the device that is not there is made of parts of torch {TORCH[:-1]}, and this is {version('torch')}"
        )
    folder = tmp_path_factory.mktemp("gpu")
    try:
        library = guard(folder)
    except Missing as missing:
        pytest.skip(f"NOT TESTED: the GPU path, since {missing}")

    def found(worker: str, *arguments: str) -> Any:
        file = folder / f"{worker}.json"
        env = {**os.environ, "OVERNIGHT_GUARD": str(library), "TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder)}
        command = [sys.executable, "-m", f"tests.gpu.{worker}", str(file), *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(file.read_text(encoding="utf-8"))

    return found
