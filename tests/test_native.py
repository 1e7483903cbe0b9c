"""C is compiled by the compiler that is named, however it is named; where it cannot be, that is said as one kind of error."""

from __future__ import annotations

import ctypes
import os
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
@pytest.mark.parametrize("kept", [0.5, 0.9, -16, -1])
def test_a_file_that_is_cut_short_or_has_no_seal_is_never_loaded(source: Path, monkeypatch: pytest.MonkeyPatch, kept: float) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -DSEVEN=7")
    place = native._built(source, ())
    content = place.read_bytes()
    place.unlink()
    place.write_bytes(content[: int(kept * len(content)) if kept > 0 else int(kept)])  # by half of it a process would be ended by SIGBUS
    assert native._built(source, ()).read_bytes()[-16:] == native._seal(content[:-16])


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_file_that_fits_is_not_built_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -DSEVEN=7")
    place = native._built(source, ())
    before = place.stat().st_ino
    assert native._built(source, ()).stat().st_ino == before and library(source).seven() == 7


def compiler(folder: Path, says: str, fails: str) -> str:
    """Write a compiler that prints a byte string for its version, and then fails as is said."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\nif [ $1 = --version ]; then printf '{says}'; exit; fi\n{fails}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("fails", "said"),
    [("printf 'erreur \\351' >&2; exit 1", "erreur \N{REPLACEMENT CHARACTER}$"), ("exit 3", "it says nothing; its exit status is 3$")],
)
def test_a_compiler_that_fails_is_told_with_what_it_said_in_any_encoding(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, said: str
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, "version fran\\347aise", fails))
    with pytest.raises(NoCompiler, match=said):
        library(source)


def test_a_cache_of_a_relative_path_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert native._cache() == tmp_path / "home" / ".cache" / "overnight"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_file_is_on_the_disk_before_it_has_its_name(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{COMPILER} -DSEVEN=7")
    named: list[bool] = []
    monkeypatch.setattr(native.os, "fsync", lambda file: named.append(any(native._cache().glob("*.so"))))
    assert native._built(source, ()).exists()
    assert named == [False]


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("cache", ["none, of a user without a home", "one that others may write"])
def test_without_a_cache_all_processes_build_in_one_folder_beside_the_temporary_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("CC", f"{COMPILER} -DSEVEN=7")
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    if cache.startswith("none"):
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(native.Path, "home", homeless)
    else:
        (tmp_path / "cache" / "overnight").mkdir(parents=True)
        (tmp_path / "cache" / "overnight").chmod(0o777)
    assert library(source).seven() == 7
    folder = tmp_path / f"overnight-{os.getuid()}"
    assert native._cache() == folder and list(folder.glob("seven-*.so")) and folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("taken", ["a link", "a folder that others may write", "a file"])
def test_a_folder_of_others_is_not_built_in_and_that_of_the_process_goes_with_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(native.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "own"))
    monkeypatch.setattr(native.atexit, "register", lambda function, *args, **more: gone.append(args[0]))
    gone: list[str] = []
    folder = tmp_path / f"overnight-{os.getuid()}"
    if taken == "a link":
        folder.symlink_to(tmp_path)
    elif taken == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    native._of_this_process.cache_clear()
    assert native._cache() == tmp_path / "own" and gone == [str(tmp_path / "own")]
    native._of_this_process.cache_clear()
