"""C sources compiled for this CPU: built once by the C compiler of the machine and kept in the user's cache."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from overnight.errors import UserError

if TYPE_CHECKING:
    import numpy as np

# -march=native: it runs where it was built. -std=c11 keeps gcc from contracting to fused multiply-adds; a source that gains by it asks for it, as for another
# order of sums. Without -fno-trapping-math gcc computes the exponentials number by number where there is no AVX-512: both sides of a choice might trap.
_FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=c11", "-shared", "-fPIC"]

_SEAL_BYTES = 16


class NoCompiler(UserError):
    """A C source could not be built here."""


@functools.cache
def library(source: Path, *defines: str) -> ctypes.CDLL:
    """The compiled form of a C source.

    Args:
        source: a file that needs nothing but the standard library and the headers beside it.
        defines: its macros, `NAME=value`.

    Raises:
        NoCompiler: saying what is missing.
    """
    try:
        try:
            return ctypes.CDLL(str(_built(source, defines)))
        except OSError:  # a damaged file, or one that another machine has built with a newer C library
            return ctypes.CDLL(str(_built(source, defines, anew=True)))
    except OSError as error:  # a compiler that is not there, a full disk, or a cache from which nothing may be run
        raise NoCompiler(
            f"{source.name} could not be built or loaded ({error}): set CC to a C compiler, XDG_CACHE_HOME to a folder that programs may be run from"
        ) from None


def compiler_words(variable: str, usual: Sequence[str]) -> list[str]:
    """Return the command of a compiler, with the arguments that it is given; empty where none of the usual ones is there.

    Args:
        variable: of the environment, which goes first, such as `CC="ccache gcc"`.
        usual: the names to look for.
    """
    given = os.environ.get(variable, "")
    try:
        words = shlex.split(given)
    except ValueError:  # a quotation mark that is not closed
        words = [given]
    return words or [path for name in usual if (path := shutil.which(name))][:1]


def _built(source: Path, defines: Sequence[str], anew: bool = False) -> Path:
    compiler = compiler_words("CC", ("cc", "gcc"))
    if not compiler:
        raise NoCompiler("there is no C compiler: install gcc, or set CC")
    command = [*compiler, *_FLAGS, *(f"-D{define}" for define in defines)]
    text = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    version = _done([*compiler, "--version"]).stdout
    key = hashlib.blake2b(repr((text, command, version, _cpu())).encode(), digest_size=10).hexdigest()
    place = _cache() / f"{source.stem}-{key}.so"
    if anew or not _is_whole(place):
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            built = Path(folder) / "native.so"
            done = _done([*command, str(source), "-o", str(built), "-lm"])
            if done.returncode:
                said = done.stderr.strip()[-2000:] or f"it says nothing; its exit status is {done.returncode}"
                raise NoCompiler(f"{' '.join(command)} failed:\n{said}")
            with built.open("rb+") as file:
                file.write(_seal(file.read()))  # behind the end of the library, where the system does not look
                file.flush()
                os.fsync(file.fileno())  # else a power failure may leave the name with nothing, or zeros, in it
            built.rename(place)
    return place


def _done(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler, whose messages may be in any encoding."""
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_SEAL_BYTES]


def _is_whole(place: Path) -> bool:
    """Return whether a library is as it was built: one that is cut short would end the process, not be an error, when it is used."""
    content = place.read_bytes() if place.exists() else b""
    return content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES])


def optional_library(source: Path) -> ctypes.CDLL | None:
    """Return the compiled form of a C source, or None where there is no compiler and another path must do."""
    try:
        return library(source)
    except NoCompiler:
        return None


def address(array: np.ndarray) -> ctypes.c_void_p:
    """Return where an array lies, for a function in C; it must be contiguous, and outlive the call."""
    return ctypes.c_void_p(array.ctypes.data)


def _cache() -> Path:
    """A folder that only the user can write, since what lies there is run."""
    for folder in _places():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK) and not folder.stat().st_mode & 0o022:
                return folder
        except OSError:
            pass
    return _of_this_process()


def _places() -> Iterator[Path]:
    """Yield where that may be: in the user's cache, or beside the temporary files, for all processes where the cache cannot be written."""
    with contextlib.suppress(RuntimeError):  # of a user without a home
        cache = os.environ.get("XDG_CACHE_HOME", "")  # which is ignored if it is relative, as its specification asks
        yield (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "overnight"
    if not (folder := Path(tempfile.gettempdir(), f"overnight-{os.getuid()}")).is_symlink():
        yield folder


@functools.cache
def _of_this_process() -> Path:
    folder = tempfile.mkdtemp(prefix="overnight-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _cpu() -> str:
    """What -march=native depends on: homes are shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
    except OSError:
        return platform.machine() + platform.processor()
