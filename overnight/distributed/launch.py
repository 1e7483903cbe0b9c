"""`overnight launch`: pretraining in many processes, on this machine and others, or as a job of Slurm.

overnight launch RECIPE                                             a process for each GPU of this machine
overnight launch RECIPE --nodes 4 --rendezvous first.machine:29500  the same command on each of four machines
overnight launch RECIPE --nodes 4 --processes 8 --slurm --submit    a job that resumes by itself when its time is over
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from overnight.batches.batch_size import micro_batch
from overnight.config import Run
from overnight.errors import ConfigError, UserError
from overnight.machine import usable_cores

_TEMPLATE = Path(__file__).with_name("slurm.sh")
_TIME = "12:00:00"
# Slurm's own: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.
_TIMES = re.compile(
    r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?|(?P<H>\d+):(?P<M>\d+):(?P<S>\d+)|(?P<minutes>\d+)(:(?P<seconds>\d+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Job:
    """What the command line asks for; None: not said."""

    recipe: str
    overrides: list[str] = field(default_factory=list)
    """As `key=value`."""
    nodes: str = "1"
    """Machines, or MIN:MAX."""
    processes: int | None = None
    """On each machine."""
    rendezvous: str = ""
    restarts: int = 0
    signal_before: int = 300
    """Seconds from a signal to the end, in which the step is finished and a checkpoint written."""
    slurm: bool = False
    submit: bool = False
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    cpus: int | None = None
    """Cores of each machine."""
    extend: bool = False
    """Resume from the checkpoints of a shorter run."""

    @property
    def machines(self) -> tuple[int, int]:
        """At least and at most."""
        least, _, most = self.nodes.partition(":")
        return int(least), int(most or least)


def launch(run: Run, job: Job) -> int:
    """Do what `overnight launch` was asked for; returns the exit code: that of the processes, or of sbatch.

    Raises:
        ConfigError: when the options do not fit each other or the recipe.
        UserError: when there is no sbatch, or a process was killed.
    """
    if problems := list(check_job(job)):
        raise ConfigError("\n".join(problems))
    if job.slurm:
        assert job.processes is not None, "check_job asks for it"
        check_micro_batches(run, job.machines, job.processes)
        script = slurm_script(run, job)
        if job.submit:
            return submit(script)
        print(script, end="")
        return 0
    processes = job.processes or processes_here(run)
    check_micro_batches(run, job.machines, processes)
    # Each process would take all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes)))
    from overnight.distributed.elastic import run_agent

    # What `precision: auto` means is said once, not by each process.
    overrides = [*job.overrides, f"precision={run.precision}"]
    command = ["pretrain", job.recipe, *(["--extend"] if job.extend else []), *(f"--{override}" for override in overrides)]
    return run_agent(command, job.machines, processes, job.rendezvous, run.run_dir, job.restarts, job.signal_before)


def check_job(job: Job) -> Iterator[str]:
    """Yield options that cannot work, alone or together, one line each."""
    if not re.fullmatch(r"\d+(:\d+)?", job.nodes) or not 0 < job.machines[0] <= job.machines[1]:
        yield f"--nodes={job.nodes}: must be a number above 0, or MIN:MAX for machines that come and go"
        return
    for name in ("processes", "cpus"):
        if (value := getattr(job, name)) is not None and value <= 0:
            yield f"--{name}={value}: must be above 0"
    if job.restarts < 0:
        yield f"--restarts={job.restarts}: must be 0 or more"
    if not 0 < job.signal_before <= 65535:
        yield f"--signal-before={job.signal_before}: must be 1 to 65535 seconds"
    if job.rendezvous and not _is_endpoint(job.rendezvous):
        yield f"--rendezvous={job.rendezvous}: must be HOST:PORT, of one of the machines, the port 1 to 65535"
    yield from _slurm_problems(job) if job.slurm else _machine_problems(job)


def _is_endpoint(text: str) -> bool:
    """Return whether a text is HOST:PORT, whose host may be the name of a machine; sockets take a larger port for another one."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]+):([0-9]{1,5})", text)
    try:
        return found is not None and bool(found[1].encode("idna")) and 0 < int(found[2]) <= 65535
    except UnicodeError:  # a part of the name is empty, or longer than 63 characters
        return False


def _machine_problems(job: Job) -> Iterator[str]:
    if job.machines[1] > 1 and not job.rendezvous:
        yield f"--nodes={job.nodes}: needs --rendezvous=HOST:PORT, of one of the machines; start the same command on each, or add --slurm"
    for name in ("submit", "time", "partition", "account", "cpus"):
        if getattr(job, name):
            yield f"--{name}: needs --slurm"


def _slurm_problems(job: Job) -> Iterator[str]:
    if job.processes is None:
        yield "--slurm: needs --processes, as many on each machine as it has GPUs"
    if ":" in job.nodes:
        yield f"--nodes={job.nodes}: Slurm gives a fixed number of machines; when one fails it starts the job again"
    if job.rendezvous:
        yield f"--rendezvous={job.rendezvous}: the job meets at its first machine; leave it out with --slurm"
    for name in ("partition", "account"):
        # They go into comments that sbatch reads: nothing could be quoted there.
        if (value := getattr(job, name)) is not None and not re.fullmatch(r"[\w.,@+-]+", value, re.ASCII):
            yield f"--{name}={value!r}: must be of letters, digits and . , @ + - _"
    seconds = time_limit(job.time or _TIME)
    if seconds is None:
        yield f"--time={job.time}: must be as Slurm writes it: minutes, hours:minutes:seconds or days-hours:minutes:seconds, above 0"
    elif job.signal_before >= seconds:
        yield f"--signal-before={job.signal_before}: must be below the time of the job, {seconds} s"


def time_limit(text: str) -> int | None:
    """Return seconds of a time as Slurm writes it; None where it is none."""
    if not (found := _TIMES.fullmatch(text)):
        return None
    part = {name: int(value or 0) for name, value in found.groupdict().items()}
    hours = part["d"] * 24 + part["h"] + part["H"]
    minutes = hours * 60 + part["m"] + part["M"] + part["minutes"]
    return minutes * 60 + part["s"] + part["S"] + part["seconds"] or None


def check_micro_batches(run: Run, nodes: tuple[int, int], processes: int) -> None:
    """Check that every batch can be split over the processes of any number of machines that may be there.

    Raises:
        ConfigError: naming the phase and the number of processes.
    """
    for count in range(nodes[0], nodes[1] + 1):
        for name, phase in run.phases.items():
            try:
                micro_batch(phase, 0, count * processes)
            except ConfigError as error:
                raise ConfigError(f"phases.{name}.{error} (--nodes={count} --processes={processes})") from None


def processes_here(run: Run) -> int:
    """Return as many as there are GPUs; 1 without, or where the recipe trains on the CPU."""
    if run.compute.device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def slurm_script(run: Run, job: Job) -> str:
    """Return the batch script of a job: it starts one `overnight launch` on each machine, and puts itself back into the queue after SIGUSR1."""
    settings = {
        "job-name": re.sub(r"[^\w.-]+", "-", run.name, flags=re.ASCII),
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": None if run.compute.device == "cpu" else job.processes,
        "cpus-per-task": job.cpus,
        "partition": job.partition,
        "account": job.account,
        "time": job.time or _TIME,
        "signal": f"USR1@{job.signal_before}",
    }
    options = {"nodes": job.nodes, "processes": job.processes, "restarts": job.restarts, "signal-before": job.signal_before}
    command = [sys.executable, "-m", "overnight", "launch", job.recipe, *(f"--{name}={value}" for name, value in options.items())]
    command += ["--extend"] if job.extend else []
    filled = {
        "settings": "\n".join(f"#SBATCH --{name}={value}" for name, value in settings.items() if value is not None),
        "command": shlex.join(command),
        "overrides": shlex.join(f"--{override}" for override in job.overrides),
    }
    return re.sub(r"@(\w+)@", lambda found: filled[found[1]], _TEMPLATE.read_text(encoding="utf-8"))


def submit(script: str) -> int:
    """Give a script to sbatch; returns its exit code.

    Raises:
        UserError: when there is none.
    """
    if shutil.which("sbatch") is None:
        raise UserError("sbatch: not found; submit from a machine of the cluster, or leave out --submit to print the script")
    return subprocess.run(["sbatch"], input=script, text=True, check=False).returncode
