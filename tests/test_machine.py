"""What this machine has is what this process may use of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from overnight import machine


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "200000 100000"}, 2.0),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({}, 64),
    ],
)
def test_a_container_has_the_cores_whose_time_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: float
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n", encoding="ascii")
    assert machine._cgroup_cores(tmp_path) == cores


def test_a_part_of_a_core_is_one_and_a_process_has_no_more_than_it_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for given, cores in ((1.5, 2), (0.2, 1), (2.0, 2), (64, 8)):
        monkeypatch.setattr(machine, "_cgroup_cores", lambda given=given: given)
        assert machine.usable_cores() == cores


def test_what_the_processor_has_cannot_be_changed_by_who_asked() -> None:
    assert isinstance(machine.processor()[1], frozenset)


@pytest.mark.parametrize(
    ("vendor", "flags", "intel", "mkl"),
    [
        ("GenuineIntel", "avx2", True, True),
        ("GenuineIntel", "avx2 avx512f", True, True),
        ("AuthenticAMD", "avx2", False, True),
        ("AuthenticAMD", "avx2 avx512f", False, False),
        ("ARM", "asimd bf16", False, False),
    ],
)
def test_who_multiplies_in_fp32_is_decided_by_the_processor(
    vendor: str, flags: str, intel: bool, mkl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\nmodel name\t: one of many\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / "cpuinfo" if path == "/proc/cpuinfo" else Path(path))
    for known in (machine.processor, machine.is_intel, machine.prefers_mkl):
        monkeypatch.setattr(machine, known.__name__, known.__wrapped__)
    assert (machine.is_intel(), machine.prefers_mkl()) == (intel, mkl)
