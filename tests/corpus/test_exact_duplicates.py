"""Equal documents on the disk, compared with a set in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overnight.corpus import exact_duplicates, external_sort
from overnight.corpus.exact_duplicates import first_occurrences
from overnight.corpus.shards import checked_chunk, seal_chunk, write_table
from overnight.errors import DataError

# Few, so that many are equal, and with first halves that others have.
HASHES = st.sampled_from([bytes([a] * 8 + [b] * 8) for a in (0, 1, 255) for b in (0, 7, 255)])


def chunks_of(folder: Path, parts: list[list[bytes]]) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    paths = [folder / f"clean-{number:05d}.arrow" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        write_table(path, {"hash": pa.array(part, pa.binary(16))})
        seal_chunk(path)
    return paths


def expected(parts: list[list[bytes]]) -> list[bool]:
    everything = [each for part in parts for each in part]
    return [each not in everything[:i] for i, each in enumerate(everything)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(st.lists(HASHES, max_size=20), min_size=1, max_size=9),
    run=st.integers(1, 30),
    block=st.integers(1, 7),
    fan_in=st.integers(2, 4),
    size=st.integers(1, 200),
)
def test_the_first_of_equal_documents_stays(tmp_path: Path, parts: list[list[bytes]], run: int, block: int, fan_in: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_duplicates, "_RUN", run)
        patch.setattr(exact_duplicates, "_BLOCK", block)
        patch.setattr(external_sort, "BLOCK", block)
        patch.setattr(external_sort, "FAN_IN", fan_in)
        patch.setattr(external_sort, "RANGE", size)
        chunks = chunks_of(tmp_path / "work", parts)
        assert first_occurrences(chunks, 1).tolist() == expected(parts)
        assert first_occurrences(chunks, 1).tolist() == expected(parts)  # of files that are there


def test_more_workers_write_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_duplicates, "_RUN", 10)
    rng = np.random.default_rng(0)
    parts = [[rng.integers(0, 2, 16, np.uint8).tobytes()[:15] + bytes([i % 3]) for i in range(12)] for _ in range(4)]
    written = []
    for workers in (1, 2):
        chunks = chunks_of(tmp_path / "work", parts)
        assert first_occurrences(chunks, workers).tolist() == expected(parts)
        written.append({path.name: path.read_bytes() for path in (tmp_path / "work").iterdir()})
    assert written[0] == written[1] and "hashes-00003.run" in written[0]


def test_a_changed_hash_is_refused(tmp_path: Path) -> None:
    chunks = chunks_of(tmp_path / "work", [[bytes(16)], [bytes(16)]])
    first_occurrences(chunks, 1)
    run = tmp_path / "work/hashes-00000.run"
    run.write_bytes(b"\1" + run.read_bytes()[1:])
    with pytest.raises(DataError, match=r"hashes-00000\.run: was cut short or changed"):
        first_occurrences(chunks, 1)


def test_one_document_many_times_takes_no_more_memory_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_sort, "BLOCK", 16)
    chunks = chunks_of(tmp_path / "work", [[bytes(16)] * 500, [b"\1" * 16] * 300])
    sizes = []
    original = exact_duplicates._second_halves
    monkeypatch.setattr(
        exact_duplicates, "_second_halves", lambda task, documents: sizes.append(len(documents)) or original(task, documents)
    )
    assert np.flatnonzero(first_occurrences(chunks, 1)).tolist() == [0, 500]
    assert len(sizes) == 50 and max(sizes) <= 17


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")
def test_no_chunk_stays_mapped_while_their_hashes_are_sorted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = list[int]()

    def counted(path: Path) -> Path:
        mapped.append(Path("/proc/self/maps").read_text().count(str(tmp_path)))
        return checked_chunk(path)

    monkeypatch.setattr(exact_duplicates, "checked_chunk", counted)
    first_occurrences(chunks_of(tmp_path / "work", [[bytes([number] * 16)] for number in range(20)]), 1)
    assert len(mapped) > 20 and max(mapped) < 10
