"""A CUDA device that is not there, for processes of their own: fake tensors on it pass through the real code, without numbers.

Import this before torch, whose hooks are looked up once: `from tests.gpu import fake_cuda`. Then :func:`install` says which GPU it is.
Whatever reads a number back from the device, and so would wait for it, raises an error; so does a copy that the host waits for.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

_SOURCE = Path(__file__).with_name("guard.cpp")


class Missing(Exception):
    """What is needed to build the guard is not here."""


def guard(folder: Path) -> Path:
    """Return the library that stands for the driver, built in about two seconds where it is not there.

    Raises:
        Missing: saying what is.
    """
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    torch = Path(found.origin).parent
    if "+cpu" not in importlib.metadata.version("torch"):
        raise Missing("the torch of this environment is built for CUDA, where the guard would stand beside torch's own")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not (torch / "include").is_dir():
        raise Missing("there is no C++ compiler to build tests/gpu/guard.cpp with")
    key = hashlib.blake2b(
        f"{importlib.metadata.version('torch')} {sys.version} {torch}".encode() + _SOURCE.read_bytes(), digest_size=8
    ).hexdigest()
    place = folder / f"guard-{key}.so"
    if not place.exists():
        built = place.with_suffix(f".{os.getpid()}")
        flags = ["-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
        done = subprocess.run(
            [compiler, *flags, str(_SOURCE), "-o", str(built), "-lc10", "-ltorch_cpu"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Missing(f"{compiler} does not build tests/gpu/guard.cpp: {done.stderr[-500:]}")
        built.rename(place)
    return place


class Event:
    """An event in a stream that does nothing."""

    def __init__(self, **settings: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Note nothing."""


def properties(capability: tuple[int, int]) -> types.SimpleNamespace:
    """What torch tells of a GPU: an A100 or an H100, by its capability."""
    name, units, shared = ("NVIDIA H100 80GB HBM3", 132, 232448) if capability[0] == 9 else ("NVIDIA A100-SXM4-80GB", 108, 166912)
    return types.SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=units,
        total_memory=80 << 30,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024,
        L2_cache_size=50 << 20,
        gcnArchName="",
        clock_rate=1980000,
        memory_clock_rate=2619000,
        memory_bus_width=5120,
        uuid="fake",
    )


def install(capability: tuple[int, int] = (9, 0)) -> None:
    """Tell torch that there is one GPU of a capability."""
    import torch
    import torch.nn.functional as F
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses.fake_tensor import FakeTensor

    found, state = properties(capability), torch.zeros(16, dtype=torch.uint8)
    cuda: Any = torch.cuda
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "_lazy_init": None,
        "is_initialized": True,
        "get_device_properties": found,
        "_get_device_properties": found,
        "get_device_capability": capability,
        "get_device_name": found.name,
        "is_bf16_supported": True,
        "synchronize": None,
        "set_device": None,
        "is_current_stream_capturing": False,
        "get_rng_state": state,
        "set_rng_state": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **kwargs: answer)
    cuda.Event = Event
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    lower = {
        "getDevice": 0,
        "setDevice": None,
        "exchangeDevice": 0,
        "maybeExchangeDevice": 0,
        "getDeviceCount": 1,
        "getCurrentRawStream": 0,
    }
    for name, answer in lower.items():
        setattr(torch._C, f"_cuda_{name}", lambda *args, answer=answer: answer)
    number = 10 * capability[0] + capability[1]
    interface: dict[str, Any] = {"is_available": True, "get_compute_capability": number, "current_device": 0, "get_raw_stream": 0}
    interface |= {"is_triton_capable": True, "get_device_properties": found, "exchange_device": 0, "maybe_exchange_device": 0}
    for name, answer in {**interface, **dict.fromkeys(("set_device", "synchronize", "raise_if_triton_unavailable"))}.items():
        setattr(CudaInterface, name, staticmethod(lambda *args, answer=answer, **kwargs: answer))
    CudaInterface.Worker.get_device_properties = staticmethod(lambda *args: found)  # type: ignore[method-assign]
    CudaInterface.Worker.current_device = staticmethod(lambda: 0)  # type: ignore[method-assign]
    torch.version.cuda = "12.8"  # type: ignore[misc]
    torch.backends.cuda.is_flash_attention_available = lambda: True
    # An address that differs from storage to storage, is a multiple of 16, and is never read.
    FakeTensor.data_ptr = lambda self: 16 * self.untyped_storage()._cdata + self.storage_offset() * self.element_size()  # type: ignore[method-assign]
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]


class Driver:
    """Triton's driver of a GPU that does nothing: kernels are compiled for it in earnest, and their launches noted."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability, self.utils = 10 * capability[0] + capability[1], self
        self.launched: list[tuple[str, tuple[int, int, int], int]] = []
        """Kernel, grid and number of arguments of each launch."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def is_active(self) -> bool:
        return True

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert kernel
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        names = ("max_num_regs", "sm_clock_rate", "mem_clock_rate", "mem_bus_width")
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, **dict.fromkeys(names, 0)}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What launches a compiled kernel."""

        def launch(x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
            self.launched.append((source.fn.__name__, (x, y, z), len(rest)))

        return launch


def end(file: str | Path, text: str) -> NoReturn:
    """Write the result of a process and end it, without the end of the interpreter.

    autograd's thread of the device may still give back Python objects of a backward pass that is over. The interpreter ends a thread that wants
    it then, in C++ frames that may not be left so: `terminate called without an active exception`, now and then.
    """
    Path(file).write_text(text, encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def drive(capability: tuple[int, int]) -> Driver:
    """Give Triton a driver that does nothing."""
    from torch.utils import _triton
    from triton.runtime import driver

    found = Driver(capability)
    driver.set_active(found)
    _triton.triton_hash_with_backend = lambda: "fake"
    return found


def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0) -> Any:
    """What `scaled_dot_product_attention` chooses on a GPU: flash without a mask and in 16 bits, else the kernel of little memory, its mask as a bias."""
    import torch

    if attn_mask is None and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, False, False)[0]
    bias = None
    if attn_mask is not None:
        zero, never = (torch.full((), value, dtype=q.dtype, device=q.device) for value in (0.0, float("-inf")))
        bias = torch.where(attn_mask, zero, never).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, dropout_p, False)[0]


if "torch" not in sys.modules and os.environ.get("OVERNIGHT_GUARD"):
    ctypes.CDLL(os.environ["OVERNIGHT_GUARD"], mode=ctypes.RTLD_GLOBAL)
