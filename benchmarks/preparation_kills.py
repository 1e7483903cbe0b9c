"""Kill workers, scheduler and command of a preparation on a Dask cluster at random, and see that it ends with the bytes of one process.

    python -m benchmarks.preparation_kills                 50 kills, about 10 minutes on two cores
    python -m benchmarks.preparation_kills --minutes 5     as many as fit

All are killed by `kill -9`, as soon as a random number of files has appeared since the last kill. Instead of a killed worker another one is started; after the scheduler's
death the command must end with 1, and cluster and command are started again; so is a killed command. After eight kills at most a preparation is left to its
end, and every file is compared. `made again` counts intermediate files that were whole at the kill and were written once more before the next: tasks that were in flight.
Into benchmarks/results/<date>-<machine>-preparation-kills/ goes result.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import psutil

from overnight.config import Data
from overnight.corpus import pipeline
from overnight.errors import UserError
from overnight.run_dir.environment import environment

VICTIMS = ("worker", "worker", "scheduler", "command")
WORKERS, MOST_KILLS, MOST_FILES = 2, 8, 60
_WITHIN = 300.0
"""Seconds after which something hangs."""


@dataclass
class Outcome:
    """What the kills did."""

    kills: Counter[str] = field(default_factory=Counter)
    preparations: int = 0
    equal: int = 0
    """Of them, those with all bytes of one process."""
    different: list[str] = field(default_factory=list)
    """Files that are another one, too many or too few."""
    made_again: list[int] = field(default_factory=list)
    """Files, by kill, between it and the next."""
    codes_without_scheduler: Counter[int] = field(default_factory=Counter)
    """Exit codes of the command after the death of the scheduler."""
    seconds_without_scheduler: list[float] = field(default_factory=list)
    """Until it had ended."""


def settings(folder: Path, address: str = "") -> Data:
    """Every stage that has tasks."""
    return Data(
        paths=[str(folder / "topics.jsonl")],
        vocab_size=1000,
        valid_fraction=0.1,
        near_duplicates=0.8,
        repeated_paragraphs=5,
        workers=1,
        scheduler=address,
    )


def prepare(folder: Path, name: str, address: str = "") -> None:
    """Prepare with tasks of little text, as the command does."""
    pipeline.CHUNK_BYTES = 10_000
    pipeline.prepare(settings(folder, address), folder / name, lambda line: print(line, flush=True), shard_tokens=10_000)


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files of a prepared folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


class Campaign:
    """A cluster, and preparations on it in folders of their own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw, self.port = folder, random.Random(seed), 0
        self.outcome, self.processes = Outcome(), {}
        texts = sorted(pydoc_data.topics.topics.items())
        (folder / "topics.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _, text in texts), encoding="utf-8")
        prepare(folder, "whole")
        self.expected = contents(folder / "whole")
        self.processes: dict[str, psutil.Popen] = {}
        self.started = 0
        self.start_cluster()

    def start(self, name: str, *command: str) -> None:
        """Start a process; what it prints goes to a file of its name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.processes[name] = psutil.Popen([sys.executable, *command], stdout=log, stderr=log, env=variables)

    def said(self, name: str, words: str) -> int:
        """How often a process has printed something."""
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace").count(words) if path.exists() else 0

    def wait(self, fact: Callable[[], object]) -> float:
        """Seconds until something is so."""
        begin = time.monotonic()
        while not fact():
            if time.monotonic() - begin > _WITHIN:
                raise SystemExit(f"waited {_WITHIN} s; see {self.folder}:\n{(self.folder / 'command.log').read_text()[-3000:]}")
            time.sleep(0.02)
        return round(time.monotonic() - begin, 1)

    def start_cluster(self) -> None:
        """Start a scheduler at the port that the last one had, and workers."""
        before, port = self.said("scheduler", "Scheduler at:"), self.port or "0"
        options = ["--host", "127.0.0.1", "--port", str(port), "--dashboard-address", "127.0.0.1:0"]
        self.start("scheduler", "-m", "distributed.cli.dask_scheduler", *options)
        self.wait(lambda: self.said("scheduler", "Scheduler at:") > before)
        lines = (self.folder / "scheduler.log").read_text(encoding="utf-8").splitlines()
        self.address = next(line for line in reversed(lines) if "Scheduler at:" in line).split()[-1]
        self.port = int(self.address.rpartition(":")[2])
        for number in range(WORKERS):
            self.start_worker(f"worker-{number}")

    def start_worker(self, name: str) -> None:
        """Start a worker that lives as long as the scheduler."""
        options = ["--nthreads", "1", "--no-nanny", "--memory-limit", "0", "--dashboard-address", "127.0.0.1:0"]
        self.start(name, "-m", "distributed.cli.dask_worker", self.address, *options, "--local-directory", str(self.folder / "scratch"))

    def start_command(self, name: str) -> None:
        """Begin a preparation, or continue it."""
        self.start("command", "-m", "benchmarks.preparation_kills", "--folder", str(self.folder), "--name", name, "--address", self.address)

    def kill(self, *names: str) -> None:
        """Kill processes that are there."""
        for name in names:
            process = self.processes.pop(name, None)
            if process:
                process.kill()
                process.wait()

    def sealed(self, name: str) -> dict[str, int]:
        """When each whole intermediate file was written."""
        found = {}
        for path in (self.folder / name / "work").glob("*.json"):
            try:
                found[path.name] = path.stat().st_mtime_ns
            except OSError:  # cleared away at the end
                continue
        return found

    def reach(self, name: str, files: int) -> bool:
        """Wait until there are so many whole files; False where the command has ended before."""
        command = self.processes["command"]
        self.wait(lambda: len(self.sealed(name)) >= files or command.poll() is not None)
        return command.poll() is None

    def prepare(self, name: str, kills: int) -> None:
        """Prepare, killed at most so often; compare the result."""
        self.start_command(name)
        there: dict[str, int] = {}
        for _ in range(kills):
            victim = self.draw.choice(VICTIMS)
            if not self.reach(name, len(self.sealed(name)) + self.draw.randrange(1, MOST_FILES)):
                break
            before, there = there, self.sealed(name)
            if before:
                self.outcome.made_again.append(sum(there[key] != when for key, when in before.items() if key in there))
            self.strike(victim, name)
            self.outcome.kills[victim] += 1
        command = self.processes.pop("command")
        self.wait(lambda: command.poll() is not None)
        assert command.returncode == 0, (command.returncode, (self.folder / "command.log").read_text()[-3000:])
        self.outcome.preparations += 1
        found = contents(self.folder / name)
        self.outcome.different += sorted(key for key in found.keys() | self.expected.keys() if found.get(key) != self.expected.get(key))
        self.outcome.equal += found == self.expected
        shutil.rmtree(self.folder / name)

    def strike(self, victim: str, name: str) -> None:
        """Kill, and start again what is needed to continue."""
        if victim == "worker":
            one = f"worker-{self.draw.randrange(WORKERS)}"
            self.kill(one)
            self.start_worker(one)
        elif victim == "command":
            self.kill("command")
            self.start_command(name)
        else:
            command = self.processes.pop("command")
            self.kill("scheduler")
            self.outcome.seconds_without_scheduler.append(self.wait(lambda: command.poll() is not None))
            self.outcome.codes_without_scheduler[command.returncode] += 1
            self.kill(*(f"worker-{number}" for number in range(WORKERS)))
            self.start_cluster()
            self.start_command(name)

    def row(self) -> str:
        """What has happened so far."""
        o = self.outcome
        kills = ", ".join(f"{count} {victim}" for victim, count in sorted(o.kills.items()))
        codes = ", ".join(f"{code} x {count}" for code, count in o.codes_without_scheduler.items())
        slowest = max(o.seconds_without_scheduler, default=0)
        return (
            f"{o.kills.total()} kills ({kills}): {o.equal} of {o.preparations} preparations equal; at most {max(o.made_again, default=0)} files made again; "
            f"without scheduler the command ended with {codes or '-'} within {slowest} s{'; DIFFERENT: ' if o.different else ''}{', '.join(o.different)}"
        )


def run(folder: Path, options: argparse.Namespace, place: Path) -> Campaign:
    """Kill until there are so many kills, or the time is over; keep what has happened after each preparation."""
    campaign, begin = Campaign(folder, options.seed), time.monotonic()
    try:
        while (left := options.kills - campaign.outcome.kills.total()) > 0 and time.monotonic() - begin < 60 * options.minutes:
            campaign.prepare(f"out-{campaign.outcome.preparations}", min(left, MOST_KILLS))
            print(campaign.row(), flush=True)
            found = {"environment": environment(), "seed": options.seed, "workers": WORKERS, **vars(campaign.outcome)}
            place.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    finally:
        campaign.kill(*list(campaign.processes))
    return campaign


def main() -> None:
    """Run the campaign, print its table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60.0, help="no new preparation begins after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default=f"cpu{psutil.cpu_count()}", help="word for the machine in the name of the results folder")
    for hidden in ("--folder", "--name", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.address:
        try:
            prepare(Path(options.folder), options.name, options.address)
        except UserError as error:
            print("error:", error)
            sys.exit(error.exit_code)
        return
    out = Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-preparation-kills"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(Path(folder), options, out / "result.json").outcome
    if outcome.equal != outcome.preparations or set(outcome.codes_without_scheduler) - {1}:
        raise SystemExit("not the bytes of one process, or not the exit code")


if __name__ == "__main__":
    main()
