"""Precision of a run: the type of its matrix products, and the automatic loss scale of fp16."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from overnight.config import Run, without_auto
from overnight.distributed.world import device_of
from overnight.engine.finite import NonFiniteError
from overnight.errors import ConfigError
from overnight.machine import BF16_CAPABILITY, has_bf16, has_fp16, has_int8

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "int8": torch.bfloat16,
}
"""Type of activations and matrix products; tf32 differs from fp32 only in how a GPU multiplies, fp8 and int8 from bf16 in the matrix products of the layers."""

AnyRun = TypeVar("AnyRun", bound=Run)
INITIAL_SCALE, FLOOR, CEILING = 2.0**16, 1.0, 2.0**40
WINDOW = 1000
"""Clean steps after which the scale doubles."""


@dataclass
class LossScale:
    """The automatic loss scale of fp16 (Puri et al. 2018, arXiv 1812.01466): halved on overflow, doubled after `WINDOW` clean steps.

    Window and floor are those of the published code; it starts where torch's GradScaler does, not at 2^32, from which it would be halved about
    fifteen times. It is always a power of two, so that scaling rounds nothing. Two plain numbers, so that it can be saved.
    """

    scale: float = INITIAL_SCALE
    clean: int = 0
    """Steps without overflow since the scale last changed."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(grads, 1 / self.scale)

    def update(self, finite: bool) -> None:
        """Take in whether the gradient of a step was finite.

        Raises:
            NonFiniteError: when it was not at the lowest scale: then it is not the scale that overflows.
        """
        if finite:
            self.clean += 1
            if self.clean == WINDOW:
                self.scale, self.clean = min(2 * self.scale, CEILING), 0
        elif not self.lower():
            raise NonFiniteError(
                f"the loss scale is at its floor of {FLOOR:g}, so it is not the scale that overflows fp16. "
                "Train with precision=bf16 (in a folder of its own), or lower the learning rate"
            )

    def lower(self) -> bool:
        """Halve the scale; False at the lowest, where it stays."""
        if self.scale <= FLOOR:
            return False
        self.scale, self.clean = self.scale / 2, 0
        return True


def to_fp8(model: nn.Module, device: torch.device) -> None:
    """Compute the matrix products of a network's layers in 8 bits, in place, forward and backward; names and parameters stay.

    torchao's training with a scale for each tensor (E4M3, gradients E5M2). Where there is no hardware for it, it is emulated:
    as exact, and slower than bf16.

    Raises:
        ConfigError: where torchao is not installed.
    """
    # On import it warns of its kernels for GPUs that are not there.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ConfigError("precision = fp8: needs the extra `fp8`: pip install 'overnight[fp8]', or use bf16") from None
    # Rows of a batch need not be a multiple of 16, which the hardware wants.
    config = Float8LinearConfig(emulate=not multiplies_in_8_bits(device), pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=_in_a_layer)


def _in_a_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and ".layers." in name and module.in_features % 16 == module.out_features % 16 == 0


def multiplies_in_8_bits(device: torch.device) -> bool:
    """Return whether a device has matrix products in 8 bits; elsewhere they are emulated."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def emulates_bf16(device: torch.device) -> bool:
    """Return whether a device computes bf16 by means of fp32, and slower than that; of a GPU torch calls it supported there, too (`torch.cuda.is_bf16_supported`)."""
    return torch.cuda.get_device_capability(device) < BF16_CAPABILITY if device.type == "cuda" else not has_bf16()


def emulates(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device computes numbers of 16 bits by means of fp32, and slower than that."""
    return (dtype == torch.bfloat16 and emulates_bf16(device)) or (dtype == torch.float16 and device.type == "cpu" and not has_fp16())


def slow_precision(precision: str, device: torch.device) -> str:
    """Return what is slow about a precision that a device computes by means of another, and what to use instead; empty where it has it."""
    if precision == "int8":  # for CPUs alone, and 16 bits are little of the work
        text = "this processor has no instructions for 8-bit products, which take ten times as long as in fp32; use precision=fp32"
        return "" if has_int8() else text
    dtype = DTYPES[precision]
    if not emulates(dtype, device):
        return ""
    if device.type == "cuda":
        return "this GPU has no bf16 and emulates it, which is slow and uses no tensor cores; use precision=fp16"
    name = "fp16" if dtype == torch.float16 else "bf16"
    return f"this processor has no {name} and emulates it, which takes several times as long as fp32; use precision=fp32"


def asked_precision(overrides: Sequence[str]) -> str:
    """Return the precision that overrides name; empty where they leave it to the run and the machine."""
    return next((text.partition("=")[2] for text in reversed(without_auto(overrides)) if text.startswith("precision=")), "")


def to_answer(run: AnyRun, overrides: Sequence[str]) -> AnyRun:
    """Return a trained run in the precision in which it answers: its own, but fp32 where its device emulates that, unless an override names one.

    There fp32 is faster, and nearer to the weights.

    Args:
        run: with the overrides.
        overrides: `key=value`, as the command line has them.
    """
    slow = emulates(DTYPES[run.precision], device_of(run))
    return replace(run, precision="fp32") if slow and not asked_precision(overrides) else run


def set_matmul_precision(precision: str, device: torch.device) -> None:
    """Set whether the fp32 matmuls of a GPU are TF32 (11 significant bits); a CPU has no TF32, and nothing changes there."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def set_deterministic(device: torch.device) -> None:
    """Have torch take algorithms that give the same bits each time on a GPU, attention's backward pass included, or refuse what has none; a CPU's are so anyway.

    Call it before the first matrix product: cuBLAS asks for its workspace then.
    """
    if device.type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Only to be warned would leave flash attention as it is.
    torch.use_deterministic_algorithms(True, warn_only=False)
    # Nothing here reads memory that was never written, and filling it takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
