"""The doctor says what is there and what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from overnight.cli import doctor as subject
from overnight.cli.doctor import doctor, findings
from overnight.machine import why_no_kernels
from overnight.models.attention import why_padded
from overnight.optim import native
from overnight.optim.batch import why_lists


def states(folder: Path) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings(folder)}


def test_this_machine_can_run_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_DATA", str(tmp_path))
    text = doctor(tmp_path)
    assert "nothing is missing" in text
    for what in ("Python", "torch", "varlen attention", "bf16", "C++ compiler", "extra report", "free disk", "memory", "OVERNIGHT_DATA"):
        assert any(line[2:].startswith(what) for line in text.splitlines()), what


def test_the_lines_are_aligned_and_fit(tmp_path: Path) -> None:
    lines = doctor(tmp_path).splitlines()[:-2]
    width = max(len(finding.what) for finding in findings(tmp_path))
    assert all(line[2 + width : 4 + width] == "  " for line in lines)


def test_a_missing_package_is_named_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = subject.package_version
    monkeypatch.setattr(subject, "package_version", lambda name: None if name in ("zstandard", "plotly") else there(name))
    text = doctor(tmp_path)
    assert "pip install zstandard" in text and "missing: packages needed" in text
    assert "without plotly: pip install 'overnight[report]'" in text
    assert states(tmp_path)["extra report"] == "note"


def test_a_compiler_that_cannot_build_is_said_with_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "cc -fopenmp failed: unsupported option '-fopenmp'"
    monkeypatch.setattr(native, "why_not", lambda: why)
    why_lists.cache_clear()
    try:
        found = {finding.what: finding for finding in findings(tmp_path)}
    finally:
        why_lists.cache_clear()
    assert found["C compiler"].state == "note" and found["C compiler"].text.startswith(why)
    assert found["LAMB, LANS, LARS"].text == f"by lists of tensors, since {why}"


def test_a_missing_compiler_and_a_wrong_data_folder_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("OVERNIGHT_DATA", str(tmp_path / "absent"))
    found = states(tmp_path)
    assert found["C++ compiler"] == "note" and found["OVERNIGHT_DATA"] == "missing"
    (tmp_path / "ccache").touch(mode=0o700)
    monkeypatch.setenv("CXX", "ccache g++")
    assert states(tmp_path)["C++ compiler"] == "ok"
    monkeypatch.delenv("OVERNIGHT_DATA")
    assert states(tmp_path)["OVERNIGHT_DATA"] == "note"


def test_an_older_torch_without_varlen_attention_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert states(tmp_path)["varlen attention"] == "note"


def test_it_works_without_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert states(tmp_path)["memory"] == "ok"


def test_a_gpu_is_told_its_attention_and_its_steps_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for capability, attention, steps in (
        ((9, 0), "variable lengths, without padding", "by Triton's kernels"),
        ((7, 5), "since the kernel needs compute capability 8.0", "since Triton needs compute capability 8.0, this GPU has 7.5"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        why_padded.cache_clear(), why_lists.cache_clear()
        told = {finding.what: (finding.state, finding.text) for finding in subject._kernels(gpu=True)}
        good = "ok" if capability >= (8, 0) else "note"
        assert told["attention"][0] == told["LAMB, LANS, LARS"][0] == good
        assert attention in told["attention"][1] and steps in told["LAMB, LANS, LARS"][1]
        assert told["layers"][1].endswith(f"of BERT in {'bf16' if good == 'ok' else 'fp16'}, with compute.torch_compile")
    why_padded.cache_clear(), why_lists.cache_clear()


@pytest.mark.parametrize(
    ("capability", "state", "text"),
    [((8, 0), "ok", "in the GPU's hardware"), ((7, 0), "note", "not in the GPU's hardware: fp16 is many times faster")],
)
def test_bf16_that_a_gpu_emulates_is_not_called_its_hardware(
    capability: tuple[int, int], state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)  # as torch says of a V100
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = subject._bf16(gpu=True)
    assert (found.state, found.text) == (state, text)


def test_a_gpu_for_which_torch_has_no_kernels_is_missing_one_that_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "compute_90"])
    found = []
    for capability in ("7.0", "7.5", "8.9", "12.0"):
        machine = {"gpus": [{"name": "one", "memory_gb": 16, "capability": capability}], "cuda": "13.0", "driver": "580"}
        found += subject._gpus(machine)
    assert [each.state for each in found] == ["missing", "ok", "ok", "ok"]
    assert "no kernels for compute capability 7.0, only for sm_75, sm_80, sm_90, compute_90; install one that has" in found[0].text


@pytest.mark.parametrize(
    ("capability", "built", "there"),
    [
        ((7, 0), [], True),  # nobody knows
        ((9, 0), ["sm_80"], False),
        ((8, 6), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a", "compute_80"], True),
        ((12, 0), ["sm_100", "sm_120"], True),
        ((10, 0), ["compute_120"], False),
    ],
)
def test_kernels_of_torch_are_for_later_gpus_of_their_major_version(capability: tuple[int, int], built: list[str], there: bool) -> None:
    assert (not why_no_kernels(capability, built)) == there
