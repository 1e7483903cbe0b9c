"""Kill a training run a hundred times at random moments, and see that it ends with the bits of the undisturbed run.

    python -m benchmarks.kills                 100 kills, about 20 minutes on two cores
    python -m benchmarks.kills --kills 7       one of each kind

Kinds: `kill -9` and SIGTERM of a single process, and of one or of all of two; at a moment drawn evenly over what is left of the run, or
as soon as a checkpoint is being written. After each kill the same command continues. Lost are the optimizer steps that were logged after the
newest whole checkpoint. Two processes are started by `overnight launch` and talk over gloo; after the death of one the other must end, and the
launch with it.
Into benchmarks/results/<date>-<machine>-kills/ goes result.json, after each kind; the same command continues with the kinds that are not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from overnight import config
from overnight.checkpoint import reader
from overnight.corpus.pipeline import prepare
from overnight.errors import DataError
from overnight.run_dir.environment import environment

_EVERY = 20
"""Steps between checkpoints."""
_STEPS = 200
"""Of a run, in two phases."""
_WITHIN = 60.0
"""Seconds in which all must have ended after the death of one."""


@dataclass(frozen=True)
class Kind:
    """A way to be killed."""

    name: str
    signal: signal.Signals
    processes: int = 1
    all: bool = False
    saving: bool = False
    """As soon as a checkpoint is being written."""


KINDS = [
    Kind("kill -9", signal.SIGKILL),
    Kind("SIGTERM", signal.SIGTERM),
    Kind("kill -9 during a save", signal.SIGKILL, saving=True),
    Kind("kill -9 of one of 2", signal.SIGKILL, 2),
    Kind("SIGTERM of one of 2", signal.SIGTERM, 2),
    Kind("kill -9 of both of 2", signal.SIGKILL, 2, all=True),
    Kind("kill -9 of one of 2 during a save", signal.SIGKILL, 2, saving=True),
]


@dataclass
class Outcome:
    """What the kills of a kind did."""

    kind: str
    kills: int = 0
    runs: int = 0
    """Trainings that were killed and continued until they ended."""
    equal: int = 0
    """Of them, those with the bits of the undisturbed run, optimizer included."""
    lost: list[int] = field(default_factory=list)
    """Steps that had to be done again, by kill."""
    others: list[float] = field(default_factory=list)
    """Seconds until the process that was not killed had ended, and the launch with it."""
    codes: list[int] = field(default_factory=list)
    """Exit codes of the process, or of the launch, by kill."""


class Campaign:
    """Runs of one recipe in folders of their own."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        data = {"dir": str(folder / "data"), "vocab_size": 1000, "min_chars": 400, "valid_fraction": 0.05}
        optim = {"name": "lamb", "lr": 0.01, "schedule": {"name": "poly", "warmup_ratio": 0.1}}
        phase = {"steps": 120, "global_batch_size": 16, "seq_len": 48, "micro_batch_size": 4, "max_predictions_per_seq": 8, "optim": optim}
        self.tree = {
            "name": "kills",
            "data": data,
            "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "max_position_embeddings": 64},
            "phases": {"short": phase, "long": {**phase, "steps": 80, "seq_len": 64, "optim": {**optim, "reset_moments": False}}},
            "logging": {"log_every": 1, "eval_every": 40, "eval_examples": 32},
            "checkpoint": {"save_every": _EVERY},
            "compute": {"threads": 1, "device": "cpu"},
        }
        run = config.build_run(self.tree)
        prepare(run.data, run.data_dir, log=lambda text: None)
        self.references = {processes: self._undisturbed(processes) for processes in (1, 2)}
        self.life = {processes: seconds for processes, (_, seconds) in self.references.items()}

    def start(self, name: str, processes: int) -> psutil.Popen:
        """Begin a run, or resume it: the process itself, or the launch of several."""
        recipe = self.folder / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump({**self.tree, "out": str(self.folder / name)}), encoding="utf-8")
        words = ["pretrain", str(recipe)] if processes == 1 else ["launch", str(recipe), f"--processes={processes}"]
        with (self.folder / f"{name}.log").open("ab") as log:
            variables = {**os.environ, "OMP_NUM_THREADS": "1"}
            return psutil.Popen([sys.executable, "-m", "overnight", *words], env=variables, stdout=log, stderr=log)

    def _undisturbed(self, processes: int) -> tuple[Path, float]:
        name, start = f"undisturbed-{processes}", time.monotonic()
        self._end(name, self.start(name, processes))
        return self.folder / name, time.monotonic() - start

    def kill(self, kind: Kind, name: str, outcome: Outcome) -> bool:
        """Resume a run and kill it; False where it had ended before."""
        running = self.start(name, kind.processes)
        # Over what is left to do, so that a run is killed several times; what it takes to start is always left.
        left = max(0.3, 1 - self._done(name) / _STEPS)
        at = time.monotonic() + self.draw.uniform(0, left * self.life[kind.processes])
        # A save of this process: what an earlier one left behind does not count.
        before = set((self.folder / name / "checkpoints").glob(".step-*.tmp"))
        skipped = self.draw.randrange(4)
        while running.poll() is None:
            if kind.saving:
                now = set((self.folder / name / "checkpoints").glob(".step-*.tmp"))
                if now - before:
                    skipped, before = skipped - 1, now
                    if skipped < 0:
                        break
                before &= now
            elif time.monotonic() >= at and len(self._training(running, kind)) == kind.processes:
                break
            time.sleep(0.0005 if kind.saving else 0.01)
        victims = self._training(running, kind)
        if not kind.all and victims:
            victims = [self.draw.choice(victims)]
        if running.poll() is not None or not victims:
            # The machine has become faster: later draws must not lie beyond the end.
            self.life[kind.processes] *= 0.8
            self._end(name, running)
            return False
        killed = time.monotonic()
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(kind.signal)
        code = running.wait(_WITHIN)
        if len(victims) < kind.processes:
            outcome.others.append(round(time.monotonic() - killed, 1))
        outcome.kills += 1
        outcome.codes.append(code)
        outcome.lost.append(self._lost(name))
        return True

    def _training(self, running: psutil.Popen, kind: Kind) -> list[psutil.Process]:
        """The processes that train."""
        try:
            return [running] if kind.processes == 1 else running.children()
        except psutil.NoSuchProcess:
            return []

    def _end(self, name: str, running: psutil.Popen) -> None:
        code = running.wait()
        assert code == 0, (code, (self.folder / f"{name}.log").read_text()[-3000:])

    def finish(self, name: str, processes: int) -> None:
        """Resume a run until it ends."""
        self._end(name, self.start(name, processes))

    def _lost(self, name: str) -> int:
        metrics, steps = self.folder / name / "metrics.jsonl", [0]
        for line in metrics.read_text().splitlines() if metrics.exists() else ():
            with contextlib.suppress(ValueError):  # the last line may be cut by the kill
                steps.append(json.loads(line).get("global_step", 0))
        return max(steps) - self._done(name)

    def _done(self, name: str) -> int:
        """The step of the newest whole checkpoint."""
        for place in sorted((self.folder / name / "checkpoints").glob("step-*"), reverse=True):
            with contextlib.suppress(DataError):
                return reader.read_checkpoint(place)[0].global_step
        return 0

    def equal(self, name: str, processes: int) -> bool:
        """Whether the newest checkpoint has the bits of the undisturbed run's, and its last validation losses are its."""
        ours, theirs = (self._state(folder) for folder in (self.folder / name, self.references[processes][0]))
        same = ours[0].keys() == theirs[0].keys() and all(torch.equal(ours[0][key], theirs[0][key]) for key in theirs[0])
        return same and ours[1] == theirs[1]

    def _state(self, folder: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
        place = reader.newest_checkpoint(folder / "checkpoints")
        assert place is not None
        _, model, optimizer = reader.read_checkpoint(place)[:3]
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        held = [{k: v for k, v in line.items() if k != "seconds"} for line in lines if line["kind"] == "eval"]
        return {**model, **{f"optimizer {name}": tensor for name, tensor in optimizer.items()}}, held


def run_kind(campaign: Campaign, kind: Kind, kills: int) -> Outcome:
    """Kill runs one after another until there are so many kills; each continues until it ends and is compared."""
    outcome = Outcome(kind.name)
    while outcome.kills < kills:
        name = f"{kind.name.replace(' ', '-')}-{outcome.runs}"
        # At most eight kills of a run: a life is drawn anew for each, so that late moments are reached too.
        for _ in range(8):
            if outcome.kills == kills or not campaign.kill(kind, name, outcome):
                break
        campaign.finish(name, kind.processes)
        outcome.runs += 1
        outcome.equal += campaign.equal(name, kind.processes)
        shutil.rmtree(campaign.folder / name)
        print(row(outcome), flush=True)
    return outcome


def row(outcome: Outcome) -> str:
    """A line of the table."""
    others = f"{max(outcome.others):5.1f} s" if outcome.others else ""
    return f"{outcome.kind:36}{outcome.kills:6}{outcome.runs:6}{outcome.equal:7}{max(outcome.lost, default=0):6}{others:>12}  " + " ".join(
        f"{code} x {count}" for code, count in counted(outcome.codes)
    )


def counted(codes: list[int]) -> list[tuple[int, int]]:
    """How often each exit code came, commonest first."""
    return sorted(((code, codes.count(code)) for code in set(codes)), key=lambda pair: -pair[1])


def main() -> None:
    """Run the campaign, print its table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default=f"cpu{psutil.cpu_count()}", help="word for the machine in the name of the results folder")
    options = parser.parse_args()
    out = Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-kills"
    out.mkdir(parents=True, exist_ok=True)
    # Kills of one process are cheaper, and so is their share greater.
    shares = [2 if kind.processes == 1 else 1 for kind in KINDS]
    counts = [max(1, options.kills * share // sum(shares)) for share in shares]
    counts[0] += max(0, options.kills - sum(counts))
    place = out / "result.json"
    outcomes = [Outcome(**kind) for kind in json.loads(place.read_text(encoding="utf-8"))["kinds"]] if place.exists() else []
    print(f"{'kind':36}{'kills':>6}{'runs':>6}{'equal':>7}{'lost':>6}{'others end':>12}  exit codes")
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), options.seed)
        for kind, count in zip(KINDS, counts, strict=True):
            if kind.name in {outcome.kind for outcome in outcomes}:
                continue
            outcomes.append(run_kind(campaign, kind, count))
            place.write_text(json.dumps(result(outcomes), indent=1) + "\n", encoding="utf-8")
    found = result(outcomes)
    print(
        f"{found['kills']} kills of {found['runs']} runs: {found['equal']} runs equal bit for bit, "
        f"at most {found['most_steps_lost']} steps lost of {_EVERY} between checkpoints"
    )
    sys.exit(found["equal"] != found["runs"] or found["most_steps_lost"] > _EVERY)


def result(outcomes: list[Outcome]) -> dict[str, Any]:
    """What is kept."""
    return {
        "command": ["python", "-m", "benchmarks.kills", *sys.argv[1:]],
        "environment": environment(),
        "checkpoint_every": _EVERY,
        "kills": sum(o.kills for o in outcomes),
        "runs": sum(o.runs for o in outcomes),
        "equal": sum(o.equal for o in outcomes),
        "most_steps_lost": max(max(o.lost) for o in outcomes),
        "kinds": [asdict(outcome) for outcome in outcomes],
    }


if __name__ == "__main__":
    main()
