"""Out of an archive comes what is wanted, under bare names in one folder, whatever the archive says."""

from __future__ import annotations

import errno
import io
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from overnight.download import unpack as unpack_module
from overnight.download.transfer import DiskFullError
from overnight.download.unpack import unpack
from overnight.errors import DataError


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members.items():
            opened.writestr(name, content)
    return path


def test_only_what_matches_is_taken_and_nothing_leaves_the_folder(tmp_path: Path) -> None:
    names = [
        "CoLA/train.tsv",
        "CoLA/dev.tsv",
        "CoLA/original/raw/x.tsv",
        "../CoLA/y.tsv",
        "/CoLA/z.tsv",
        "CoLA/../../w.tsv",
        "CoLA/.v.tsv",
        "u.tsv",
        "CoLA/a.md",
    ]
    found = unpack(archive(tmp_path / "a.zip", {name: name.encode() for name in names}), "CoLA/*.tsv", tmp_path / "out", "CoLA.zip")
    assert {one.member: one.target for one in found} == {
        "CoLA/train.tsv": tmp_path / "out/train.tsv",
        "CoLA/dev.tsv": tmp_path / "out/dev.tsv",
    }
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [".dev.tsv.part", ".train.tsv.part", "a.zip"]
    assert found[0].part.read_bytes() == b"CoLA/train.tsv" and found[0].size == 14


def test_an_archive_of_other_things_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"X.zip: has no CoLA/\*.tsv in it"):
        unpack(archive(tmp_path / "a.zip", {"SST/train.tsv": b"x"}), "CoLA/*.tsv", tmp_path / "out", "X.zip")


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.zip", {"CoLA/train.tsv": b"abc" * 100})
    whole = path.read_bytes()
    for broken in (b"", whole[:60], whole[:-10], whole[:45] + b"\xff\xff" + whole[47:]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"X\.zip: is damaged or no zip archive"):
            unpack(path, "CoLA/*.tsv", tmp_path / "out", "X.zip")


def test_an_archive_that_would_fill_the_disk_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "a.zip", {"CoLA/train.tsv": bytes(2_000_000)})
    with pytest.raises(DataError, match="would unpack to 2,000,000 bytes, more than 200 times its size"):
        unpack(path, "CoLA/*.tsv", tmp_path / "out", "X.zip")

    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(99))
    path = archive(tmp_path / "a.zip", {"CoLA/train.tsv": b"x" * 100})
    with pytest.raises(DiskFullError, match="make room, and the same command continues, or name another folder with --to"):
        unpack(path, "CoLA/*.tsv", tmp_path / "out", "X.zip")
    assert not (tmp_path / "out" / "train.tsv").exists()


def test_a_disk_that_fills_up_is_named_and_gets_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.FileIO):
        def write(self, block: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = open
    monkeypatch.setattr(unpack_module, "open", lambda path, mode: (Full if "dev" in path.name else real)(path, mode), raising=False)
    path = archive(tmp_path / "a.zip", {"CoLA/train.tsv": b"x" * 100, "CoLA/dev.tsv": b"y" * 100})
    with pytest.raises(
        DiskFullError, match=rf"{tmp_path}/out: No space left on device for what X\.zip unpacks to; make room, and .* --to$"
    ):
        unpack(path, "CoLA/*.tsv", tmp_path / "out", "X.zip")
    assert not list((tmp_path / "out").iterdir())
