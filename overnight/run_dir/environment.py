"""What a number was measured on: versions, processor, memory, GPU, threads and load.

Needs the standard library only; torch and numpy are described where they are installed.
"""

from __future__ import annotations

import datetime
import functools
import importlib.util
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import overnight
from overnight.machine import memory_bytes, processor, usable_cores

# Processor features that decide which matrix kernels run.
_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "sve",
)  # fmt: skip
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "THP_MEM_ALLOC_ENABLE",
    "WORLD_SIZE",
)
_PACKAGES = ("torch", "numpy", "tokenizers", "transformers", "pyarrow", "safetensors", "scikit-learn", "scipy")


def environment() -> dict[str, Any]:
    """Return the machine and the software a measurement was made with, as plain JSON values.

    Returns:
        versions, `commit` (None outside a checkout), `cpu`, `memory_gb`, `gpus` (a list, empty without one), `threads`, `load_average`
        (1, 5 and 15 minutes) and the environment variables that change speed.
    """
    return {
        "overnight": overnight.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := package_version(name))},
        "os": platform.platform(),
        "cpu": cpu(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "load_average": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        **_torch(),
    }


@functools.cache
def package_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _commit() -> str | None:
    """Return :func:`git_commit` of this package as it was at the first call: a benchmark writes its environment after every row."""
    return git_commit()


def git_commit(folder: Path | None = None) -> str | None:
    """Return the commit of the checkout that the package runs from, with `+changes` where files differ from it; None outside a checkout."""
    root = folder or Path(overnight.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if not commit:
        return None
    return commit + ("+changes" if _output("git", "-C", str(root), "status", "--porcelain") else "")


def cpu() -> dict[str, Any]:
    """Return processor model, the cores this process may use, and the features that decide which kernels run."""
    model, flags = processor()
    return {"model": model, "cores": usable_cores(), "flags": [flag for flag in _FLAGS if flag in flags]}


def _torch() -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        return {"threads": None, "gpus": []}
    import torch

    found: dict[str, Any] = {"threads": torch.get_num_threads(), "cuda": torch.version.cuda, "gpus": []}
    # The capability torch's own kernels were dispatched to, such as AVX512; not in every version.
    capability = getattr(torch.backends.cpu, "get_cpu_capability", None)
    if capability:
        found["cpu_capability"] = capability()
    if torch.cuda.is_available():
        found["driver"] = _driver()
        found["gpus"] = [_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return found


@functools.cache
def _driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "multiprocessors": properties.multi_processor_count,
    }


def _output(*command: str) -> str | None:
    """Return what a command prints, or None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
