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
