"""Whatever ends a download, the same command continues it: kill -9, Ctrl-C, a full disk."""

from __future__ import annotations

import hashlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from overnight.cli.main import main
from tests.conftest import ROOT
from tests.download.conftest import CONTENT
from tests.download.server import Handler, Site, stall
from tests.processes import HANG


class Running(NamedTuple):
    """A download in a process of its own."""

    process: subprocess.Popen[str]
    folder: Path
    site: Site


@contextmanager
def running(site: Site, folder: Path, content: bytes, **more: Any) -> Iterator[Running]:
    """Within it, a process gets a book of which the server sends 400,000 bytes and then nothing."""
    path = "/gutenberg.pglaf.org/cache/epub/7/pg7.txt"
    site.files[path] = content
    site.faults[path] = [stall(400_000)]
    words = [sys.executable, "-m", "overnight", "download", "gutenberg", "--ids", "7", "--to", str(folder), "--mirror", site.address]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more) as process:
        part, end = folder / "books" / ".pg7.txt.part", time.monotonic() + HANG
        while not (part.is_file() and part.stat().st_size == 400_000) and process.poll() is None:
            assert time.monotonic() < end, "it hangs"
            time.sleep(0.005)
        try:
            yield Running(process, folder, site)
        finally:
            process.kill()


def continues(run: Running, content: bytes) -> bool:
    """Whether the same command gets the rest and nothing else."""
    code = main(["download", "gutenberg", "--ids", "7", "--to", str(run.folder), "--mirror", run.site.address])
    asked = run.site.ranges("/gutenberg.pglaf.org/cache/epub/7/pg7.txt")
    return code == 0 and asked == ["", "bytes=400000-"] and (run.folder / "books" / "pg7.txt").read_bytes() == content


def test_kill_9_in_the_middle_loses_nothing(site: Site, tmp_path: Path) -> None:
    with running(site, tmp_path, CONTENT) as run:
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        assert not (tmp_path / "books" / "pg7.txt").exists()
        assert continues(run, CONTENT)


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")])
def test_ctrl_c_and_sigterm_stop_at_once_and_keep_what_has_come(site: Site, tmp_path: Path, number: int, code: int, word: str) -> None:
    with running(site, tmp_path, CONTENT) as run:
        run.process.send_signal(number)
        output = run.process.communicate(timeout=HANG)[0]
        assert run.process.returncode == code
        assert f"overnight: {word}; the same command continues" in output and "Traceback" not in output
        assert continues(run, CONTENT)


def test_two_downloads_into_one_folder_are_refused(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(site, tmp_path, CONTENT) as run:
        words = ["download", "gutenberg", "--ids", "8", "--to", str(tmp_path), "--mirror", site.address]
        assert main(words) == 1
        assert f"{tmp_path}: another download writes there, process {run.process.pid} on" in capsys.readouterr().err
        assert not [path for path, _ in site.asked if "pg8" in path]


def test_a_limit_of_the_system_is_an_error_that_keeps_what_has_come(site: Site, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (123_457, 123_457))

    with running(site, tmp_path, CONTENT, preexec_fn=limit) as run:
        output = run.process.communicate(timeout=HANG)[0]
    assert (
        run.process.returncode == 1
        and "File too large after 123,457 bytes, which are kept; a limit on the size of files (ulimit -f" in output
    )
    assert (tmp_path / "books" / ".pg7.txt.part").read_bytes() == CONTENT[:123_457]


def test_a_disk_that_is_really_full_keeps_what_it_took(site: Site, tmp_path: Path) -> None:
    """A file system of 300 kB in memory, which this process may mount for itself alone on some machines only."""
    allowed = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip("this machine does not allow a file system of one's own")
    path = "/gutenberg.pglaf.org/cache/epub/7/pg7.txt"
    site.files[path] = CONTENT
    site.faults[path] = [lambda handler, content: unsaid(handler, content)]
    script = f"""mount -t tmpfs -o size=300k none {tmp_path} && cd {ROOT}
        {sys.executable} -m overnight download gutenberg --ids 7 --to {tmp_path} --mirror {site.address}; echo "code $?"
        ls -A {tmp_path}/books; head -c 1000 {tmp_path}/books/.pg7.txt.part | sha256sum"""
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=HANG, check=False)
    assert "No space left on device after" in done.stderr and "code 1" in done.stdout, done
    assert hashlib.sha256(CONTENT[:1000]).hexdigest() in done.stdout and ".pg7.txt.part" in done.stdout


def unsaid(handler: Handler, content: bytes) -> None:
    """Send a file without saying how long it is, so that it is begun where there is no room for it."""
    handler.start(200, content, None, {"Transfer-Encoding": "chunked"})
    handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))
