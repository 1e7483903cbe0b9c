"""Options that several commands have, and those of `overnight launch` and `overnight bench`."""

from __future__ import annotations

BENCHMARKS = ("train", "loop", "optim", "mlstm", "scaling", "gpu")
EXTEND = "resume from the checkpoints of a shorter run in the run folder: more steps in its last phase, or phases added behind it"
# Options of `overnight launch`: metavar (None: a switch), type, and what they say.
LAUNCH: dict[str, tuple[str | None, type, str]] = {
    "nodes": ("N", str, "machines, or MIN:MAX when they come and go (default: 1)"),
    "processes": ("P", int, "processes on each machine (default: one for each GPU, or 1)"),
    "rendezvous": ("HOST:PORT", str, "where several machines meet: a free port of one of them"),
    "restarts": ("R", int, "how often to start again after a process was lost (default: 0)"),
    "signal-before": ("SECONDS", int, "time from a signal to the end, for a step and a checkpoint (default: 300)"),
    "slurm": (None, bool, "print a script for sbatch instead of starting"),
    "submit": (None, bool, "give the script to sbatch"),
    "time": ("LIMIT", str, "of the job, as Slurm writes it (default: 12:00:00)"),
    "partition": ("NAME", str, "Slurm's"),
    "account": ("NAME", str, "Slurm's"),
    "cpus": ("C", int, "cores of each machine that Slurm is to give"),
    "extend": (None, bool, EXTEND),
}
