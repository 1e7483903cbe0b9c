"""`precision: auto`: what this machine computes fast, and what a run began with."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from overnight import config, machine
from overnight.checkpoint.run_identity import claim_folder
from overnight.errors import ConfigError

ALLOWED = "auto, fp32, tf32, bf16, fp16, fp8, int8"


@pytest.mark.parametrize(
    ("device", "torch", "visible", "instructions", "precision"),
    [
        ("auto", "2.13.0", "0", False, "bf16"),
        ("auto", "2.13.0+cu130", None, False, "bf16"),
        ("auto", "2.13.0", "", False, "fp32"),
        *(("auto", "2.13.0+cu130", shown, False, "bf16") for shown in ("1,0", "GPU-8932f937", "MIG-GPU-8932f937/1/2")),
        *(("auto", "2.13.0+cu130", hidden, False, "fp32") for hidden in ("-1", "none", "NoDevFiles", "-1,0")),
        *(("auto", f"2.13.0{build}", None, False, "fp32") for build in ("+cpu", "+cpu.cxx11.abi", "+xpu")),
        *(("auto", build, None, False, "bf16") for build in ("2.13.0.post300", "2.14.0a0+79aa174.nv26.04")),  # conda's, NVIDIA's
        ("auto", "2.13.0+rocm7.0", None, False, "fp32"),
        ("auto", "2.13.0+cpu", None, True, "bf16"),
        ("cpu", "2.13.0", None, False, "fp32"),
        ("cpu", "2.13.0", None, True, "bf16"),
        ("cuda", "2.13.0+cpu", None, False, "bf16"),
    ],
)
def test_it_is_bf16_but_fp32_on_a_cpu_that_emulates_it(
    device: str, torch: str, visible: str | None, instructions: bool, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a GPU of NVIDIA."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(machine, "_NVIDIA", (f"{tmp_path}/nvidia[0-9]*",))
    monkeypatch.setattr(machine, "_AMD", (f"{tmp_path}/kfd",))
    monkeypatch.setattr("importlib.metadata.version", lambda name: torch)
    monkeypatch.setattr(machine, "has_bf16", lambda: instructions)
    monkeypatch.setattr(machine, "_NVML", ())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = config.load_run("demo", [f"compute.device={device}", f"out={tmp_path / 'run'}"])
    assert run.precision == precision and f"precision: {precision}\n" in config.run_yaml(run)
    assert config.load_run("demo", ["precision=fp16"]).precision == "fp16"


DRIVER = """
static const int found[][2] = {%s};
static const unsigned count = sizeof(found) / sizeof(found[0]);
static int handles[8];
int nvmlInit_v2(void) { return %d; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **gpu) { *gpu = &handles[i]; return i == %d ? 15 : i < count ? 0 : 2; }
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    long i = (int *)gpu - handles;
    *major = found[i][0];
    *minor = found[i][1];
    return 0;
}
"""
"""NVIDIA's library of what its driver knows: the GPUs' compute capabilities, the code of its start, and a GPU that is lost."""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    ("gpus", "start", "lost", "capabilities", "precision"),
    [
        ("{7, 5}", 0, -1, [(7, 5)], "fp16"),
        ("{7, 0}, {6, 1}", 0, -1, [(7, 0), (6, 1)], "fp16"),
        ("{8, 0}", 0, -1, [(8, 0)], "bf16"),
        ("{12, 0}", 0, -1, [(12, 0)], "bf16"),
        ("{7, 5}, {8, 9}", 0, -1, [(7, 5), (8, 9)], "bf16"),
        ("{7, 5}, {8, 9}", 0, 1, [(7, 5)], "fp16"),
        ("{7, 5}", 0, 0, [], "bf16"),
        ("{7, 5}", 9, -1, [], "bf16"),
    ],
)
def test_on_gpus_of_which_none_has_bf16_it_is_fp16(
    gpus: str, start: int, lost: int, capabilities: list[tuple[int, int]], precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "driver.c").write_text(DRIVER % (gpus, start, lost))
    library = tmp_path / "driver.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    monkeypatch.setattr(machine, "_NVML", (f"{tmp_path}/none.so", str(library)))
    assert machine._gpu_capabilities() == capabilities
    assert config.load_run("demo", ["compute.device=cuda", f"out={tmp_path / 'run'}"]).precision == precision


def test_a_run_keeps_what_it_began_with_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_has_gpu", lambda: False)
    overrides = [f"out={tmp_path / 'run'}"]
    monkeypatch.setattr(machine, "has_bf16", lambda: True)
    claim_folder(begun := config.load_run("demo", overrides))
    monkeypatch.setattr(machine, "has_bf16", lambda: False)
    assert config.load_run("demo", [f"out={tmp_path / 'another'}"]).precision == "fp32"
    assert config.load_run("demo", overrides) == begun == config.stored_run(tmp_path / "run") and begun.precision == "bf16"
    assert dataclasses.replace(begun, precision="fp32") == config.load_run("demo", [*overrides, "precision=fp32"])
    # A damaged file is told of where it is needed.
    (tmp_path / "run" / "run.yaml").write_text("precision: [")
    assert config.load_run("demo", overrides).precision == "fp32"


@pytest.mark.parametrize(("line", "found"), [("precision: null", "None"), ("precision: 12", "12"), ("precision: foo", "'foo'")])
def test_a_run_folder_whose_precision_is_none_is_named(line: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{line}\n")
    with pytest.raises(ConfigError) as refused:
        config.load_run("demo", [f"out={tmp_path}"])
    assert str(refused.value) == f"{tmp_path / 'run.yaml'}: precision = {found}: must be one of {ALLOWED}; correct it, or put it back"


def test_of_what_is_trained_auto_says_nothing_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overnight.config.load.usual_precision", lambda device: "fp32")
    claim_folder(begun := config.load_run("demo", [f"out={tmp_path / 'run'}", "precision=bf16"]))
    (tmp_path / "run").rename(tmp_path / "moved")
    claim_folder(config.load_run("demo", [f"out={tmp_path / 'run'}", "precision=fp16"]))  # another one, where it was
    moved = dataclasses.replace(begun, out=str(tmp_path / "moved"))
    assert config.stored_run(tmp_path / "moved", ["precision=auto"]) == config.stored_run(tmp_path / "moved") == moved
    assert config.load_run(str(tmp_path / "moved" / "run.yaml"), ["precision=auto"], folder=tmp_path / "moved") == moved
    # Nor of a model of others, or of a byte model that was exported.
    monkeypatch.setattr("overnight.config.load.usual_precision", lambda device: "bf16")
    assert config.machine_run(["precision=auto"]) == config.machine_run([])
    (tmp_path / "config.json").write_text('{"name": "exported", "phases": {"only": {"steps": 1, "global_batch_size": 1}}}')
    assert config.stored_run(tmp_path, ["precision=auto"]) == config.stored_run(tmp_path)
