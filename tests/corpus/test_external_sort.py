"""Sorted runs and their merges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overnight.corpus import external_sort
from overnight.errors import DataError

RECORDS = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 1 << 40, (1 << 64) - 1]), st.integers(0, 5)), max_size=40)


def runs_of(folder: Path, parts: list[list[tuple[int, int]]]) -> list[Path]:
    paths = [folder / f"{number}.run" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        external_sort.write_run(path, np.array(part, np.uint64).reshape(-1, 2))
    return paths


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(RECORDS, min_size=1, max_size=9), block=st.integers(1, 7), fan_in=st.integers(2, 4), size=st.integers(1, 200))
def test_merging_sorts_all_whatever_the_blocks(
    tmp_path: Path, parts: list[list[tuple[int, int]]], block: int, fan_in: int, size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_sort, "BLOCK", block)
        patch.setattr(external_sort, "FAN_IN", fan_in)
        patch.setattr(external_sort, "RANGE", size)
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        runs = external_sort.few_runs(runs_of(folder, parts), folder, "test", 1)
        assert len(runs) <= fan_in
        ranges = external_sort.key_ranges(runs)
        blocks = [each for low, high in ranges for each in external_sort.merged(runs, low, high)]
        assert all(0 < len(each) <= block * len(runs) for each in blocks)
        found = [tuple(record) for each in blocks for record in each.tolist()]
        assert found == sorted(record for part in parts for record in part)


def test_runs_that_were_merged_are_not_needed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_sort, "FAN_IN", 2)
    runs = runs_of(tmp_path, [[(3, 1)], [(1, 1)], [(2, 1)], [(1, 0)], [(9, 9)]])
    merged = external_sort.few_runs(runs, tmp_path, "test", 1)
    assert not any(run.exists() for run in runs)
    assert external_sort.few_runs(runs, tmp_path, "test", 1) == merged
    assert [record for block in external_sort.merged(merged) for record in block.tolist()] == [[1, 0], [1, 1], [2, 1], [3, 1], [9, 9]]


def test_a_changed_run_is_refused(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, [[(1, 2)], [(3, 4)]])
    runs[1].write_bytes(b"\1" + runs[1].read_bytes()[1:])
    with pytest.raises(DataError, match=r"1\.run: was cut short or changed"):
        external_sort.merge_runs(external_sort.MergeTask(runs, tmp_path / "merged.run"))
