"""The equations compiled for this CPU: native.c, built once by the C compiler of the machine and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overnight.errors import UserError

_SOURCE = Path(__file__).with_name("native.c")
# -march=native: it runs where it was built. Contraction to fused multiply-adds is allowed; reordering of sums only where the source says so.
_FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-std=c11", "-shared", "-fPIC"]
_REALS = {torch.float32: ("float", "sqrtf", ctypes.c_float), torch.float64: ("double", "sqrt", ctypes.c_double)}


class NoCompiler(UserError):
    """native.c could not be built here."""


def adaptive(
    kind: str, xs: list[Tensor], gs: list[Tensor], ms: list[Tensor], vs: list[Tensor], table: Tensor, group: dict[str, Any], scratch: Tensor
) -> Tensor:
    """A LAMB or LANS step of n contiguous tensors, in place; returns the trust ratios (n).

    Args:
        kind: `lamb` or `lans`.
        xs, gs, ms, vs: parameters, gradients and moments.
        table: the numbers of the step (n, 6).
        group: settings.
        scratch: (2, N) with N at least that of the longest tensor; overwritten.
    """
    real = _REALS[table.dtype][2]
    longest = scratch.shape[1]
    sums = torch.empty(3 * (longest // 16384 + 1), dtype=torch.float64)
    trust = table.new_empty(len(xs))
    clip = group.get("trust_clip")
    _library(table.dtype).adaptive(
        ctypes.c_int(kind == "lans"),
        ctypes.c_long(len(xs)),
        _sizes(xs),
        *(_addresses(tensors) for tensors in (xs, gs, ms, vs)),
        ctypes.c_void_p(table.data_ptr()),
        ctypes.c_int(group["adapt"]),
        *(real(value) for value in (group["eps"], group["weight_decay"], group["betas"][0], float("inf") if clip is None else clip)),
        ctypes.c_void_p(scratch.data_ptr()),
        ctypes.c_long(longest),
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_void_p(trust.data_ptr()),
    )
    return trust


def lars(xs: list[Tensor], gs: list[Tensor], vs: list[Tensor], table: Tensor, group: dict[str, Any]) -> None:
    """A LARS step of n contiguous tensors, in place.

    Args:
        xs, gs, vs: parameters, gradients and momentum.
        table: the numbers of the step (n, 5).
        group: settings.
    """
    real = _REALS[table.dtype][2]
    _library(table.dtype).lars(
        ctypes.c_long(len(xs)),
        _sizes(xs),
        *(_addresses(tensors) for tensors in (xs, gs, vs)),
        ctypes.c_void_p(table.data_ptr()),
        real(group["momentum"]),
        real(group["weight_decay"]),
        ctypes.c_int(group["nesterov"]),
    )


def norms(xs: list[Tensor]) -> Tensor:
    """L2 norms of contiguous tensors of one type (n)."""
    result = xs[0].new_empty(len(xs))
    sums = torch.empty(sum(x.numel() // 16384 + 1 for x in xs), dtype=torch.float64)
    _library(result.dtype).norms(
        ctypes.c_long(len(xs)), _sizes(xs), _addresses(xs), ctypes.c_void_p(sums.data_ptr()), ctypes.c_void_p(result.data_ptr())
    )
    return result


def available() -> bool:
    """Whether native.c can be used here; builds it if need be."""
    try:
        _library(torch.float32)
    except NoCompiler:
        return False
    return True


def _sizes(xs: Sequence[Tensor]) -> Any:
    return (ctypes.c_long * len(xs))(*[x.numel() for x in xs])


def _addresses(xs: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(xs))(*[x.data_ptr() for x in xs])


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    """The library for a type.

    Raises:
        NoCompiler: saying what is missing.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompiler("fused = True on a CPU needs a C compiler: install gcc, or set CC, or leave fused out")
    name, root, _ = _REALS[dtype]
    command = [compiler, *_FLAGS, f"-DREAL={name}", f"-DSQRT={root}"]
    source = _SOURCE.read_bytes()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    key = hashlib.blake2b(repr((source, command, version, _cpu())).encode(), digest_size=10).hexdigest()
    place = _cache() / f"native-{key}.so"
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            built = Path(folder) / "native.so"
            done = subprocess.run([*command, str(_SOURCE), "-o", str(built), "-lm"], capture_output=True, text=True, check=False)
            if done.returncode:
                raise NoCompiler(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}\nLeave fused out, or mend the compiler")
            built.rename(place)
    return ctypes.CDLL(str(place))


def _cache() -> Path:
    """A folder that only the user can write, since what lies there is run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "overnight"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK) and not folder.stat().st_mode & 0o022:
            return folder
    except OSError:
        pass
    return _private()


@functools.cache
def _private() -> Path:
    return Path(tempfile.mkdtemp(prefix="overnight-"))


def _cpu() -> str:
    """What -march=native depends on: homes are shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    except OSError:
        return platform.machine() + platform.processor()
