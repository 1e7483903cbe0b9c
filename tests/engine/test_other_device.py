"""Steps on a device that is not the host's. The meta device stands for a GPU: the same paths, without its numbers."""

from __future__ import annotations

import shutil
import sysconfig
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from overnight.batches.packing import StepBatches
from overnight.distributed.world import World
from overnight.engine import workload
from overnight.engine.loop import LoopConfig, training_steps
from overnight.engine.metrics_logger import MetricsLogger
from overnight.engine.recurrent_state import RecurrentState
from overnight.engine.workload import compiles_layers
from overnight.errors import ConfigError
from overnight.models.attention import why_padded
from overnight.models.bert import BertForPretraining
from overnight.models.bytes import ByteModel
from overnight.models.fused_layer import why_not
from overnight.optim import Lamb, native
from overnight.optim.batch import why_lists
from tests.models.sample import Copies, pretraining, random_batch
from tests.models.test_bytes import batch as window
from tests.models.test_bytes import model as byte_network

META = torch.device("meta")
SETTINGS = [{}, {"recompute": 4}, {"label": True}, {"dtype": torch.bfloat16}, {"measure_every": 1, "noise_every": 1}]


@pytest.mark.parametrize("kind", ["bert", "mlstm", "lstm", "transformer"])
@pytest.mark.parametrize("changes", SETTINGS, ids=lambda changes: " ".join(changes) or "plain")
def test_all_of_a_step_is_on_the_device_and_the_host_waits_for_no_copy(kind: str, changes: dict[str, Any]) -> None:
    given = dict(changes)
    label, recompute = given.pop("label", False), given.pop("recompute", 0)
    carry: RecurrentState | None = None
    net: BertForPretraining | ByteModel
    if kind == "bert":
        net = pretraining(dropout=0.1, attention_dropout=0.1).to(META)
        net.encoder.recompute_layers("full" if recompute else "none")
    else:
        net = byte_network(kind, label, recompute).to(META)
        carry = RecurrentState(range(4), net.state_shape, World(device=META))
    micro = tuple(random_batch([20, 13, 9], seed=i) if kind == "bert" else window(steps=5, label=label, seed=i) for i in range(2))
    values = {"steps": 2, "lr": lambda step: 0.01, "max_grad_norm": 1.0, "dtype": torch.float32, "device": META, "seed": (1, 2)}
    settings = LoopConfig(**{**values, "world": World(device=META), **given})
    with Copies() as copies:
        steps = list(training_steps(net, net.losses, Lamb(net.parameters()), lambda step: StepBatches(micro, 96, 8), settings, carry=carry))
    assert len(steps) == 2 and all(loss.device == META for step in steps for loss in step.losses.values())
    assert copies.waited and not any(copies.waited)


@pytest.mark.parametrize(
    ("precision", "capability", "told"),
    [
        (
            "bf16",
            (9, 0),
            [
                "optimizer: steps by Triton's kernels",
                "attention: variable lengths, without padding (FlashAttention)",
                "layers: by Triton's kernels between the products",
            ],
        ),
        (
            "fp16",
            (7, 5),
            [
                "optimizer: steps by lists of tensors, since Triton needs compute capability 8.0, this GPU has 7.5",
                "attention: sequences padded to the longest of a micro-batch, since the kernel needs compute capability 8.0, this GPU has 7.5",
                "layers: compiled, since the kernel needs compute capability 8.0, this GPU has 7.5",
            ],
        ),
        (
            "bf16",
            (7, 0),
            [
                "warning: this GPU has no bf16 and emulates it, which is slow and uses no tensor cores; use precision=fp16",
                "optimizer: steps by lists of tensors, since Triton needs compute capability 8.0, this GPU has 7.0",
                "attention: sequences padded to the longest of a micro-batch, since the kernel needs compute capability 8.0, this GPU has 7.0",
                "layers: not compiled, since torch.compile takes no bf16 that is emulated",
            ],
        ),
    ],
)
def test_a_run_on_a_gpu_prints_what_it_takes_and_why(
    precision: str, capability: tuple[int, int], told: list[str], tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("overnight.machine.processor", lambda: ("", {"avx512_bf16", "avx512_fp16"}))
    optimizer = Lamb([torch.zeros(1, requires_grad=True)])
    for device, expected in (("cuda", told), ("cpu", [])):
        why_lists.cache_clear(), why_padded.cache_clear(), why_not.cache_clear()
        run = tiny(precision=precision, compute={"torch_compile": True})
        logger = SimpleNamespace(run=run, context=SimpleNamespace(world=World(device=torch.device(device))))
        assert list(MetricsLogger._paths(logger, optimizer)) == expected  # type: ignore[arg-type]
    why_lists.cache_clear(), why_padded.cache_clear(), why_not.cache_clear()


@pytest.mark.parametrize(
    ("precision", "has", "warned"),
    [("bf16", False, True), ("bf16", True, False), ("fp16", False, True), ("fp16", True, False), ("fp32", False, False)],
)
def test_a_run_in_16_bits_warns_where_the_processor_emulates_them(
    precision: str, has: bool, warned: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overnight.machine.processor", lambda: ("", {"avx512_bf16", "avx512_fp16"} if has else set()))
    logger = SimpleNamespace(run=tiny(precision=precision), context=SimpleNamespace(world=World()))
    said = list(MetricsLogger._paths(logger, Lamb([torch.zeros(1, requires_grad=True)])))  # type: ignore[arg-type]
    assert [line.startswith(f"warning: this processor has no {precision}") and "precision=fp32" in line for line in said] == [True] * warned


def test_a_run_on_a_cpu_warns_that_it_is_slow_without_a_c_compiler(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: "there is no C compiler: install gcc, or set CC")
    logger = SimpleNamespace(run=tiny(), context=SimpleNamespace(world=World()))
    (line,) = MetricsLogger._paths(logger, Lamb([torch.zeros(1, requires_grad=True)]))  # type: ignore[arg-type]
    assert line.startswith("warning: everything takes longer") and line.endswith("C: there is no C compiler: install gcc, or set CC")


def test_a_gpu_that_is_too_old_for_torch_compile_is_refused_before_the_first_step(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 0))
    monkeypatch.setattr("overnight.models.fused_layer.why_no_triton", lambda: "")
    with pytest.raises(ConfigError, match=r"true: torch.compile needs compute capability 7.0, this GPU has 6.0; or set it to auto"):
        compiles_layers(tiny(compute={"torch_compile": True}), torch.device("cuda"))


@pytest.mark.parametrize(
    ("version", "recomputed", "compiled"), [("2.12.1", "full", False), ("2.12.1", "none", True), ("2.13.0", "full", True)]
)
def test_layers_that_are_computed_again_are_compiled_by_a_torch_that_can(
    version: str, recomputed: str, compiled: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(workload, "compiles_layers", lambda run, device: True)
    done: list[str] = []
    encoder = SimpleNamespace(
        recompute_layers=done.append, fuse_layers=lambda *given: "there is none", compile_layers=lambda: done.append("compiled")
    )
    for asked in (True, "auto"):
        run = tiny(**{"memory.activation_checkpointing": recomputed, "compute.torch_compile": asked})
        done.clear()
        if compiled or asked == "auto":
            workload.set_up_encoder(SimpleNamespace(encoder=encoder), run, torch.device("cuda"))
            assert done == [recomputed, "compiled"][: 1 + compiled]
        else:
            with pytest.raises(
                ConfigError, match=r"torch_compile = true: torch 2.12.1 fails to compile layers .* 2.13 does not; or set it to auto"
            ):
                workload.set_up_encoder(SimpleNamespace(encoder=encoder), run, torch.device("cuda"))


@pytest.mark.parametrize(
    ("setting", "device", "capability", "triton", "compiled"),
    [
        ("auto", "cuda", (7, 0), True, True),
        ("auto", "cuda", (9, 0), False, False),
        ("auto", "cuda", (6, 1), True, False),
        ("auto", "cpu", (9, 0), True, False),
        (True, "cpu", (9, 0), False, True),
        (False, "cuda", (9, 0), True, False),
    ],
)
def test_auto_compiles_where_there_are_a_gpu_and_triton(
    setting: Any, device: str, capability: tuple[int, int], triton: bool, compiled: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    assert compiles_layers(tiny(compute={"torch_compile": setting}), torch.device(device)) is compiled


def test_a_gpu_on_which_triton_cannot_compile_trains_without_it_and_says_why(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for name in ("compiler", "headers"):
        with monkeypatch.context() as patch:
            patch.delenv("CC", raising=False)
            patch.setattr(shutil, "which", lambda program, there=name: "/usr/bin/gcc" if there == "headers" else None)
            patch.setattr(sysconfig, "get_path", lambda *of: "/nowhere")
            why_lists.cache_clear()
            why = (
                "Triton needs the headers of Python (Python.h)"
                if name == "headers"
                else "Triton needs a C compiler: install gcc, or set CC"
            )
            assert why_lists(gpu).startswith(why) and not compiles_layers(tiny(compute={"torch_compile": "auto"}), gpu)
            with pytest.raises(ConfigError, match=r"compute.torch_compile = true: Triton needs .*; or set it to auto"):
                compiles_layers(tiny(compute={"torch_compile": True}), gpu)
    why_lists.cache_clear()
