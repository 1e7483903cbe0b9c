"""Workers in processes of their own, where torch believes in a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import version
from typing import Any

import pytest

from tests.forks import Forks
from tests.gpu.fake_cuda import Missing, guard

TORCH = "2.13."
"""That of constraints.txt; another may have other internals, and Inductor other kernels."""
FIRST = [
    "tests.gpu.fake_cuda",
    "torch",
    "torch._dynamo",
    "triton",
    "overnight.models.modernbert",
    "overnight.optim",
    "tests.models.test_bytes",
]
"""What all workers begin with, in this order."""


@pytest.fixture(scope="session")
def on_fake_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
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

    env = {**os.environ, "OVERNIGHT_GUARD": str(library), "TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder)}
    forks = Forks(FIRST, folder, [], env)

    def found(worker: str, *arguments: str) -> Any:
        file = folder / f"{worker}.json"
        code, said = forks.run(f"tests.gpu.{worker}", str(file), *arguments)
        assert code == 0, said[-3000:]
        return json.loads(file.read_text(encoding="utf-8"))

    with closing(forks):
        yield found
