"""Preparation on a Dask cluster: the bytes of one process, whatever is killed, and refusals that say what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overnight import config
from overnight.config import Data
from overnight.corpus import cluster, pipeline, places, wikipedia_dump
from overnight.corpus.cluster import DaskCluster, Job, program, run_task, workers_of
from overnight.corpus.file_parts import FilePart, read_part
from overnight.corpus.pipeline import prepare
from overnight.corpus.settings import settings_of
from overnight.corpus.workers import run_tasks
from overnight.errors import ConfigError, DataError, UserError
from tests.corpus import dask_processes
from tests.corpus.test_pipeline import contents, silent, write_corpus
from tests.corpus.test_wikipedia_dump import multistream, pages
from tests.processes import HANG, Process, wait_until

pytest.importorskip("distributed", reason="the extra `dask` is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


class Cluster:
    """A scheduler and workers, as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workers = folder, []
        self.scheduler = Process(dask_processes.scheduler, 0)
        self.address = self.scheduler.stdout.readline().strip()

    def add(self, unlike: str = "") -> Process:
        """Start a worker, and wait until it works."""
        one = Process(dask_processes.worker, self.address, self.folder / "elsewhere", unlike)
        self.workers.append(one)
        line = one.stdout.readline()
        assert line == "working\n", line + one.end()[1]
        return one

    def restart(self) -> None:
        """Start the scheduler again, at the same address, and as many workers."""
        count = len(self.workers)
        self.end()
        self.scheduler = Process(dask_processes.scheduler, int(self.address.rpartition(":")[2]))
        assert self.scheduler.stdout.readline().strip() == self.address
        self.workers = []
        for _ in range(count):
            self.add()

    def end(self) -> None:
        for one in [*self.workers, self.scheduler]:
            one.__exit__(None, None, None)


@contextlib.contextmanager
def started(folder: Path, workers: int = 2) -> Iterator[Cluster]:
    one = Cluster(folder)
    try:
        for _ in range(workers):
            one.add()
        yield one
    finally:
        one.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that no test harms."""
    with started(tmp_path_factory.mktemp("cluster")) as one:
        yield one


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(wikipedia_dump, "_PACKED_BYTES", 2000)
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "text", 60)
    (tmp_path / "dump.xml.bz2").write_bytes(multistream(pages(15)))
    return tmp_path


def settings(address: str = "", **changes: Any) -> Data:
    """Every stage that has tasks; paths that begin where the command runs, and its workers do not."""
    data = Data(
        paths=["text", "dump.xml.bz2"],
        vocab_size=300,
        valid_fraction=0.2,
        workers=1,
        near_duplicates=0.8,
        repeated_paragraphs=3,
        decontaminate=["text/003.txt"],
        scheduler=address,
    )
    return dataclasses.replace(data, **changes)


def whole(corpus: Path) -> dict[str, bytes]:
    """What one process makes."""
    prepare(settings(), corpus / "whole", silent, shard_tokens=1000)
    return contents(corpus / "whole")


def chunks(folder: Path, count: int) -> Callable[[], bool]:
    """Whether so many clean chunks are there."""
    return lambda: len(list((folder / "work").glob("clean-*.arrow"))) >= count


@pytest.mark.slow
def test_a_cluster_gives_the_bytes_of_one_process_and_reads_paths_from_where_the_command_runs(corpus: Path, shared: Cluster) -> None:
    lines: list[str] = []
    prepare(settings(shared.address), Path("out"), lines.append, shard_tokens=1000)
    assert lines[0] == f"prepare: on the Dask cluster {shared.address}: 2 workers"
    found = contents(corpus / "out")
    assert len([name for name in found if name.startswith("train-")]) > 5
    assert found == whole(corpus)
    assert not (corpus / "out/work").exists()


@pytest.mark.slow
def test_a_killed_worker_costs_its_task_alone(corpus: Path) -> None:
    expected = whole(corpus)
    with started(corpus) as mine, Process(dask_processes.command, settings(mine.address), corpus / "out") as command:
        wait_until(chunks(corpus / "out", 3), command)
        mine.workers[0].send_signal(signal.SIGKILL)
        code, output = command.end()
    assert code == 0, output
    assert contents(corpus / "out") == expected


@pytest.mark.slow
def test_without_its_scheduler_it_ends_with_an_error_and_the_same_command_continues(corpus: Path) -> None:
    expected = whole(corpus)
    with started(corpus) as mine:
        with Process(dask_processes.command, settings(mine.address), corpus / "out") as command:
            wait_until(chunks(corpus / "out", 3), command)
            mine.scheduler.send_signal(signal.SIGKILL)
            code, output = command.end()
        assert code == 1
        assert "refused:" in output and "run the same command again, which continues" in output
        done = {path.name: path.stat().st_mtime_ns for path in (corpus / "out/work").glob("clean-*.arrow.json")}
        mine.restart()
        with Process(dask_processes.command, settings(mine.address), corpus / "out") as command:
            wait_until(lambda: (corpus / "out/work/read.json").exists(), command)
            kept = {path.name: path.stat().st_mtime_ns for path in (corpus / "out/work").glob("clean-*.arrow.json")}
            code, output = command.end()
    assert code == 0 and "prepare: continuing" in output
    assert len(done) >= 3 and done.items() <= kept.items()
    assert contents(corpus / "out") == expected


def test_a_killed_command_leaves_what_the_next_one_continues_also_without_the_cluster(corpus: Path, shared: Cluster) -> None:
    expected = whole(corpus)
    for after in (2, 8):
        with Process(dask_processes.command, settings(shared.address), corpus / "out") as command:
            wait_until(chunks(corpus / "out", after), command)
            command.send_signal(signal.SIGKILL)
            command.end()
    lines: list[str] = []
    prepare(settings(), corpus / "out", lines.append, shard_tokens=1000)
    assert lines[0].startswith("prepare: continuing")
    assert contents(corpus / "out") == expected


def test_a_second_command_for_a_folder_is_refused(corpus: Path, shared: Cluster) -> None:
    with Process(dask_processes.command, settings(shared.address), corpus / "out") as command:
        wait_until(chunks(corpus / "out", 1), command)
        with pytest.raises(DataError, match="another process is preparing this folder"):
            prepare(settings(shared.address), corpus / "out", silent, shard_tokens=1000)
        code, output = command.end()
    assert code == 0, output
    assert contents(corpus / "out") == whole(corpus)


@pytest.mark.parametrize(
    ("unlike", "message"),
    [
        ("version", "has tokenizers 0.0.1 where this command has"),
        ("package", "install the same version of overnight, with its extra `dask`"),
    ],
)
def test_a_worker_with_another_program_or_none_is_refused(corpus: Path, unlike: str, message: str) -> None:
    with started(corpus, workers=0) as mine:
        mine.add(unlike)
        with pytest.raises(UserError, match=f"{message}.*run the same command again, which continues"):
            prepare(settings(mine.address), corpus / "out", silent, shard_tokens=1000)


def test_workers_that_come_late_are_waited_for_and_checked_too(corpus: Path) -> None:
    with started(corpus, workers=0) as mine, Process(dask_processes.command, settings(mine.address), corpus / "out") as command:
        assert "0 workers yet; waiting for the first" in command.stdout.readline()
        wait_until((corpus / "out/work/state.json").exists, command)
        mine.add("package")  # it dies of the first task that it is given
        while "has no worker" not in (line := command.stdout.readline()):
            assert line
        assert "where overnight cannot be imported it ends at once" in line
        mine.add("version")
        code, output = command.end()
    assert code == 1
    assert "has tokenizers 0.0.1 where this command has" in output


def test_a_worker_that_does_not_see_the_folder_or_sees_another_says_so(tmp_path: Path) -> None:
    job = Job(str(tmp_path / "absent"), '"state"\n', program())
    with pytest.raises(UserError, match=r"does not see .*/absent; data.dir must be in a folder that all machines have at the same path"):
        run_task(job, abs, 1)
    (tmp_path / "absent/work").mkdir(parents=True)
    (tmp_path / "absent/work/state.json").write_text('"another"\n')
    with pytest.raises(UserError, match=r"sees another preparation in .*/absent"):
        run_task(job, abs, 1)
    (tmp_path / "absent/work/state.json").write_text(job.state)
    assert run_task(job, abs, -1) == 1
    with pytest.raises(UserError, match=f"does not see {tmp_path}/no.txt; sources and data.dir must be"):
        run_task(job, _size, tmp_path / "no.txt")
    assert not cluster._busy[job.folder]


def test_a_worker_that_has_another_source_file_or_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/state.json").write_text('"state"\n')
    job, path = Job(str(tmp_path), '"state"\n', program()), tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    (file,) = places.files(str(path))
    part = FilePart(file.name, "text", Data(), file.name, "/", 0, 8, 0, 0, planned=(file.size, file.version))
    assert len(run_task(job, read_part, part)[0]) == 1
    path.write_text("one\ntwo\nthree\n")
    named = rf"the worker of process \d+ on \S+: {path}"
    with pytest.raises(UserError, match=named + r": has changed while it was read; .* same path"):
        run_task(job, read_part, part)
    path.unlink()
    with pytest.raises(UserError, match=named + r": cannot be read \(No such file or directory\)\. Where only .* same path"):
        run_task(job, read_part, part)


def _size(path: Path) -> int:
    return len(path.read_bytes())


def _wait(stop: Path) -> int:
    stop.with_suffix(".begun").touch()
    while not stop.exists():
        time.sleep(0.01)
    return 7


def test_what_is_left_is_cleared_away_only_when_nobody_writes_there_any_more(tmp_path: Path, shared: Cluster) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/state.json").write_text('"state"\n')
    stop, lines = tmp_path / "stop", []
    data = Data(scheduler=shared.address)
    with workers_of(data, tmp_path, silent) as first, workers_of(data, tmp_path, silent) as second:
        assert isinstance(first, DaskCluster) and isinstance(second, DaskCluster)
        result = first.submit(_wait, stop)
        end = time.monotonic() + HANG
        while not stop.with_suffix(".begun").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        second._log = lambda line: (lines.append(line), stop.touch())  # type: ignore[assignment, func-returns-value]
        second.wait_for_earlier()
        assert lines == ["prepare: waiting for 1 task that a command before this one began"]
        assert result() == 7
        second.wait_for_earlier()
        assert len(lines) == 1


def test_an_error_of_a_task_arrives_as_itself(tmp_path: Path, shared: Cluster) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/state.json").write_text('"state"\n')
    with workers_of(Data(scheduler=shared.address), tmp_path, silent) as workers:
        with pytest.raises(DataError, match="task 3"):
            list(run_tasks(_fail, range(10), workers))
        assert list(run_tasks(_fail, range(2), workers)) == [0, 1]


def _fail(x: int) -> int:
    if x == 3:
        raise DataError("task 3")
    return x


def test_an_address_where_nothing_answers_or_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_ANSWER_WITHIN", 1.0)
    write_corpus(tmp_path / "text", 3)
    with pytest.raises(UserError, match=r"tcp://127.0.0.1:1: no scheduler answers there within 1 s .*run the same command again"):
        prepare(Data(paths=[str(tmp_path / "text")], scheduler="tcp://127.0.0.1:1"), tmp_path / "out", silent)
    for address in ("local", "tcp://h"):
        with pytest.raises(
            ConfigError, match=rf"'{address}': is not the address of a Dask scheduler \(missing port number.*; write tcp://HOST:8786"
        ):
            prepare(Data(paths=[str(tmp_path / "text")], scheduler=address), tmp_path / "out", silent)
    with pytest.raises(ConfigError, match=r"'nonsense://x': is not the address of a Dask scheduler .*; write tcp://HOST:8786"):
        prepare(Data(paths=[str(tmp_path / "text")], scheduler="nonsense://x"), tmp_path / "out", silent)


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    write_corpus(tmp_path / "text", 3)
    with pytest.raises(ConfigError, match=r"pip install 'overnight\[dask\]'"):
        prepare(Data(paths=[str(tmp_path / "text")], scheduler="tcp://x:1"), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_the_scheduler_decides_neither_the_bytes_nor_the_run() -> None:
    run = config.load_run("demo", ["data.scheduler=tcp://x:8786"])
    assert run.data.scheduler == "tcp://x:8786"
    assert config.identity(run) == config.identity(config.load_run("demo"))
    assert settings_of(run.data) == settings_of(config.load_run("demo").data)
