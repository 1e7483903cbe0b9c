"""What this machine has: cores, memory and what Triton needs, and how its memory is handed out."""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

# The C library's, which musl and macOS lack.
_trim, _tune = (getattr(ctypes.CDLL(None), name, None) for name in ("malloc_trim", "mallopt"))
# What a machine has where there is a GPU: NVIDIA's, the same in Windows' Linux, and AMD's.
_NVIDIA, _AMD = ("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libcuda.so*"), ("/dev/kfd",)
# What NVIDIA's driver tells of its GPUs; in Windows' Linux it lies where the loader may not look.
_NVML = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
BF16_CAPABILITY = (8, 0)
"""The least compute capability of a GPU with hardware for bf16; torch emulates it on another one, and calls it supported there, too."""
# Numbers of glibc's malloc.h, and the variables by which a user tunes the same.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_TUNED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def usable_cores() -> int:
    """Return how many logical cores this process may use: those that it may run on, or as many as its container has the time of."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, math.ceil(_cgroup_cores())))


@functools.cache
def processor() -> tuple[str, frozenset[str]]:
    """Return the model of the processor and its features, as Linux names them; no features where it does not say."""
    model, flags, info = platform.processor() or platform.machine(), set[str](), Path("/proc/cpuinfo")
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip().lower() in ("flags", "features"):
            flags.update(value.split())
    return model, frozenset(flags)


@functools.cache
def is_intel() -> bool:
    """Return whether the processor is Intel's, for which MKL was written; also where the system does not say whose it is."""
    return "GenuineIntel" in _cpuinfo()


@functools.cache
def prefers_mkl() -> bool:
    """Return whether MKL, torch's own product of fp32, is faster here than oneDNN. The processor decides, never a trial: a resumed run gives the same bits.

    On Intel's it is up to a tenth faster, or 2.7 times for a right operand that is a transpose of 768 × 3,072. On AMD's with AVX-512, of which it makes no
    use, it takes twice as long; on AMD's without, it is a tenth faster forward, and 1.2 to 2 times as fast for gradients.
    """
    return is_intel() or ("AuthenticAMD" in _cpuinfo() and "avx512f" not in processor()[1])


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "GenuineIntel"


def has_bf16() -> bool:
    """Return whether the processor has instructions for bf16; another one emulates it, slower than fp32."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(processor()[1])


def has_fp16() -> bool:
    """Return whether the processor has instructions for fp16; another one emulates it, five to a hundred times slower than fp32."""
    return not {"avx512_fp16", "amx_fp16", "asimdhp"}.isdisjoint(processor()[1])


def has_int8() -> bool:
    """Return whether the processor has instructions for sums of 8-bit products; another one takes ten to thirty times as long for them as for fp32."""
    return not {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}.isdisjoint(processor()[1])


def usual_precision(device: str) -> Literal["bf16", "fp16", "fp32"]:
    """Return what `precision: auto` means on this machine: bf16, but where there is no hardware for it fp16 on a GPU and fp32 on a CPU.

    Args:
        device: `compute.device`; what is asked for must be known before torch is loaded.
    """
    if device != "cuda" and not (device == "auto" and _has_gpu()):
        return "bf16" if has_bf16() else "fp32"
    capabilities = _gpu_capabilities()
    return "fp16" if capabilities and max(capabilities) < BF16_CAPABILITY else "bf16"


def _gpu_capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of NVIDIA's GPUs, as far as its driver tells them. CUDA is not started: processes that are forked afterwards could not use it."""
    for name in _NVML:
        try:
            nvml = ctypes.CDLL(name)
        except OSError:
            continue
        count, gpu, major, minor = ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        # Every function returns 0 where it could do it.
        found = [
            (major.value, minor.value)
            for number in range(count.value)
            if not nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(gpu))
            and not nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
        ]
        nvml.nvmlShutdown()
        return found
    return []


def _has_gpu() -> bool:
    """Return whether there is a GPU that may be used and for which the torch that is installed is built."""
    try:
        build = importlib.metadata.version("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        build = "cpu"
    # Without a name, or with that of a commit or a container, it is for CUDA most likely.
    signs = () if build.startswith(("cpu", "xpu")) else _AMD if build.startswith("rocm") else _NVIDIA
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    hidden = not first.isdecimal() and not first.startswith(("GPU-", "MIG-"))  # by -1, none and the like
    return not hidden and any(map(glob.glob, signs))


def _cgroup_cores(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many cores' time the container has (`docker --cpus`); as many as there are, without such a limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = (int(number) for file in files for number in (folder / file).read_text(encoding="ascii").split())
        except (OSError, ValueError):  # no such file here, or the word "max"
            continue
        if quota > 0 and period > 0:  # -1: without a limit
            return quota / period
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory of the machine, or of the container where that has less (bytes)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            total = min(total, int(limit.read_text(encoding="ascii")))
        except (OSError, ValueError):
            # No such file here, or the word "max".
            continue
    return total


def use_large_pages() -> None:
    """Have torch ask Linux for pages of 2 MB for tensors of that size and more, unless THP_MEM_ALLOC_ENABLE says otherwise.

    The activations of each step lie in memory that the step before gave back; with pages of 4 kB a tenth of the time on a CPU goes into
    handing it out again. To be called before the first such tensor, since torch looks at the variable once.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def return_large_blocks() -> None:
    """Have the C library give every block of 2 MB and more back to the system once it is freed, unless the environment tunes it otherwise.

    It raises that limit to 32 MB as it sees larger ones come and go; chunks of a corpus then leave gaps in its heap that nothing fits into, a seventh of the
    memory of a preparation of a gigabyte. Processes that are started from then on leave Arrow's memory to the C library, too: its own allocator keeps what is freed.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # which Arrow reads as it is loaded
    if _tune is not None and not any(name in os.environ for name in _TUNED):
        _tune(_MMAP_THRESHOLD, 2 << 20)
        # A limit of one's own for blocks leaves that for the end of the heap as it is at first, at 128 kB, and a tenth of the time would go into fetching pages.
        _tune(_TRIM_THRESHOLD, 32 << 20)


def keep_freed_memory() -> None:
    """Have the C library keep what is freed for what is asked for next, unless the environment tunes it otherwise.

    It gives blocks of 32 MB and more back to Linux at once, which hands out the same memory in the next step page by page, filled with zeros: of the
    gradients of a large vocabulary and of the weights' copies in 16 bits that takes a tenth of a step of BERT-base.
    """
    if _tune is not None and not any(name in os.environ for name in _TUNED):
        _tune(_MMAP_MAX, 0)
        _tune(_TRIM_THRESHOLD, 2**31 - 1)


def release_free_memory() -> None:
    """Return to the system what was freed and the C library keeps, where it can."""
    if _trim is not None:
        _trim(0)


def why_no_triton() -> str:
    """Return why Triton cannot launch kernels on a GPU of this machine; empty where it can. Before the first one it compiles a piece of C."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: install gcc, or set CC"
    scheme = sysconfig.get_default_scheme()  # Debian's own Python has one whose folder of headers is empty; Triton looks where this does
    headers = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    if not (Path(headers) / "Python.h").is_file():
        return "Triton needs the headers of Python (Python.h): install python3-dev"
    return ""


def why_no_kernels(capability: tuple[int, int], built: Sequence[str]) -> str:
    """Return why a torch has no kernels for a GPU of a compute capability; empty where it has.

    Args:
        built: what it was built for, as `torch.cuda.get_arch_list` has it: `sm_80` is machine code, for all later ones of the same major version, too, and
            `compute_90` a text that the driver compiles for whatever came later.
    """
    found = [(kind, int(major), int(minor)) for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)[af]?\b", " ".join(built))]
    if not built or any((major, minor) <= capability and (kind == "compute" or major == capability[0]) for kind, major, minor in found):
        return ""
    return (
        f"this torch has no kernels for compute capability {capability[0]}.{capability[1]}, only for {', '.join(built)}; install one that has "
        "(for a V100: pip install torch --index-url https://download.pytorch.org/whl/cu126)"
    )
