"""C is compiled by the compiler that is named, however it is named; where it cannot be, that is said as one kind of error."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from overnight import native
from overnight.native import NoCompiler, library, optional_library

COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "seven.c"
    path.write_text("int seven(void) { return SEVEN; }\n")
    library.cache_clear()
    yield path
    library.cache_clear()


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_compiler_may_be_named_with_arguments(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"env {COMPILER} -DSEVEN=7")
    assert library(source).seven() == 7


@pytest.mark.parametrize("named", ["/nonexistent/cc", "/nonexistent/cc -O2", "'cc", "/"])
def test_a_compiler_that_is_not_there_leaves_the_other_path(source: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.setenv("CC", named)
    assert optional_library(source) is None
    with pytest.raises(NoCompiler, match=r"seven\.c could not be built or loaded"):
        library(source)


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_cache_that_nothing_may_be_run_from_leaves_the_other_path(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: str) -> ctypes.CDLL:
        raise OSError(f"{path}: failed to map segment from shared object: Operation not permitted")

    monkeypatch.setenv("CC", f"{COMPILER} -DSEVEN=7")
    monkeypatch.setattr(native.ctypes, "CDLL", refused)
    with pytest.raises(NoCompiler, match=r"Operation not permitted.*set CC to a C compiler, XDG_CACHE_HOME to"):
        library(source)


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("content", [b"", b"\x7fELF, and no more"])
def test_a_damaged_file_in_the_cache_is_built_anew(source: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -DSEVEN=7")
    place = native._built(source, ())
    place.unlink()
    place.write_bytes(content)  # as a power failure leaves it
    assert library(source).seven() == 7


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_file_is_on_the_disk_before_it_has_its_name(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -DSEVEN=7")
    named: list[bool] = []
    monkeypatch.setattr(native.os, "fsync", lambda file: named.append(any(native._cache().glob("*.so"))))
    assert native._built(source, ()).exists()
    assert named == [False]


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_user_without_a_home_builds_in_a_folder_of_the_process(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("CC", f"{COMPILER} -DSEVEN=7")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(native.Path, "home", homeless)
    assert library(source).seven() == 7
