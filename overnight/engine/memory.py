"""Memory of training: how much is in use, how much there is, and what tells that there is no more."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from overnight.errors import UserError
from overnight.machine import memory_bytes

_HEADROOM = 0.1
"""Share of the device's memory that an automatic micro-batch leaves free: blocks that no longer fit, and what others take."""
# What is said by errors that are no torch.OutOfMemoryError: torch's allocator of the CPU, oneDNN, C++, libraries of the GPU, its runtime, its driver, Triton.
_SIGNS = (
    "can't allocate memory",
    "could not create a primitive",
    "std::bad_alloc",
    "ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # which cannot have its workspace
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
)

HOW_TO_SAVE_MEMORY = (
    "Less memory is taken with memory.activation_checkpointing=selective or full, memory.optimizer_cpu_offload=true, a 16-bit precision, a shorter length, or on more "
    "processes with distributed.strategy=fsdp"
)


class OutOfMemory(UserError):
    """A step does not fit into memory; nothing of it was kept."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def peak_gb(device: torch.device) -> float:
    """Return most memory in use since :func:`reset_peak` (GB): of tensors on a GPU, else of the whole process; 0 where the system does not tell."""
    return peak(device) / 1e9


def reset_peak(device: torch.device) -> bool:
    """Count the peak from now on; returns whether that was possible, else it counts since the process began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak(device: torch.device) -> int:
    """Return the same in bytes."""
    # Not ru_maxrss: it is inherited from the process that started this one.
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(name: str) -> int:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii", errors="replace"), re.M)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


class MemoryBudget(NamedTuple):
    """Memory of a device, as far as this process is concerned (bytes)."""

    used: int
    """Now."""
    limit: int
    """What it may use at most, so that the headroom stays free."""
    total: int
    """Of the device."""


def memory_budget(device: torch.device) -> MemoryBudget:
    """Return what a process may use of its device: all but the headroom and what others use. On a CPU the processes of a machine share alike."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryBudget(torch.cuda.memory_allocated(device), int(torch.cuda.memory_reserved(device) + free - _HEADROOM * total), total)
    import psutil

    sharing, total, used = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), memory_bytes(), _resident("VmRSS")
    free = min(psutil.virtual_memory().available, _cgroup_free())
    return MemoryBudget(used, used + int((free - _HEADROOM * total) / sharing), total)


def _cgroup_free(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Return what the container has left (bytes), the files that the kernel may forget included; infinite without one."""
    for limit, usage, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            left = int((folder / limit).read_text(encoding="ascii")) - int((folder / usage).read_text(encoding="ascii"))
            files = re.search(r"^(?:total_)?inactive_file (\d+)$", (folder / stat).read_text(encoding="ascii"), re.M)
        except (OSError, ValueError):  # no such file here, or the word "max"
            continue
        return left + (int(files[1]) if files else 0)
    return float("inf")


def release(model: nn.Module, device: torch.device) -> None:
    """Drop the gradients, captured graphs, what a failed pass left behind, and what the allocator of a GPU keeps for later."""
    model.zero_grad(set_to_none=True)
    if graphs := getattr(model, "graphs", None):  # of micro-batches that are not taken again
        graphs.captured.clear()
    gc.collect()  # where frames hold on to each other, they hold on to activations
    if device.type == "cuda":
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """Return what an error says, in a line."""
    return next(iter(str(error).splitlines()), type(error).__name__).strip()
