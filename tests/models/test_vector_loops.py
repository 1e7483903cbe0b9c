"""Loops in C that ask for vectors get them: without AVX-512 gcc otherwise computes exponentials number by number, at a seventh of the speed."""

from __future__ import annotations

import platform
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from overnight.native import _FLAGS, compiler_words
from tests.conftest import ROOT

SOURCES = {
    "models/encoder.c": ("BF16", "REAL=float"),
    "models/attention.c": ("BF16", "REAL=float"),
    "models/recurrence.c": ("BF16", "REAL=float"),
    "models/forward.c": ("REAL=float",),
    "optim/native.c": ("REAL=float -DSQRT=sqrtf",),
}
"""Sources with their macros, all but the one for AMX alone."""


def compiled(compiler: list[str], flags: list[str], source: Path, out: Path) -> str:
    """Return what gcc says of the loops that it vectorized."""
    done = subprocess.run(
        [*compiler, *flags, "-fopt-info-vec-optimized", str(source), "-o", str(out), "-lm"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def left_scalar(said: str, files: list[Path]) -> list[str]:
    """Return the loops under `omp simd` in files that gcc does not name; it names the line of a loop or the first one of its body."""
    vectors = {(Path(name).name, int(line)) for name, line in re.findall(r"^(\S+?):(\d+):\d+: optimized: +loop vectorized", said, re.M)}
    found = []
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if re.match(r"\s*#pragma omp simd", line) and vectors.isdisjoint((path.name, number + more) for more in range(4)):
                found.append(f"{path.name}:{number + 1}: {lines[number].strip()}")
    return found


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="is about the vectors of x86")
@pytest.mark.parametrize("march", ["x86-64-v3", "x86-64-v4"])
def test_every_loop_that_asks_for_vectors_gets_them(march: str, tmp_path: Path) -> None:
    compiler = compiler_words("CC", ("cc", "gcc"))
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout if compiler else ""
    number = re.search(r"Free Software Foundation", version) and re.search(r" (\d+)\.\d+", version)
    if not number or int(number[1]) < 12:
        pytest.skip("needs gcc, 12 or newer, which says what it vectorizes")
    flags = [f"-march={march}" if flag == "-march=native" else flag for flag in _FLAGS]
    jobs = [(name, define) for name, defines in SOURCES.items() for define in defines]

    def compile_one(job: tuple[str, str]) -> str:
        name, define = job
        out = tmp_path / f"{Path(name).stem}-{define.partition('=')[0]}.so"
        return compiled(compiler, [*flags, *f"-D{define}".split()], ROOT / "overnight" / name, out)

    with ThreadPoolExecutor(2) as pool:
        said = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    missed = {job: found for job in jobs if (found := left_scalar(said[job], [ROOT / "overnight" / job[0]]))}
    assert missed == {}
    # Not every source takes all of a header.
    headers = sorted((ROOT / "overnight" / "models").glob("attention*.h"))
    assert left_scalar("".join(said.values()), headers) == []


def test_a_loop_that_stays_scalar_is_found(tmp_path: Path) -> None:
    source = tmp_path / "two.c"
    source.write_text("#pragma omp simd\nfor (;;)\n    x;\n\n\n#pragma omp simd reduction(+ : y)\nfor (;;) y;\n")
    assert left_scalar(f"{source}:3:9: optimized: loop vectorized using 32 byte vectors\n", [source]) == ["two.c:7: for (;;) y;"]
