"""Faults on two and three machines, really run: what ends, what continues, how long it takes, and that the result is the same.

    python benchmarks/two_nodes.py

Each machine is a network namespace with its own address and host name, joined by a bridge; in it runs one `overnight launch` with one
process. Needs Linux with `unshare` and `ip`, and no rights. Faults are injected once the run has taken a quarter of its steps. Into
benchmarks/results/<date>-cpu<N>-two-nodes/result.json go the environment and, for each case, exit codes, seconds and the distance from
the run without faults.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

from overnight import config
from overnight.checkpoint import reader
from overnight.corpus.pipeline import prepare
from overnight.run_dir.environment import environment

STEPS, MACHINES = 160, 3
Processes = list[subprocess.Popen[bytes]]


def make_network(folder: Path) -> None:
    """Machines `node1`, `node2`, ... with addresses 10.77.0.1, ... on a bridge; inside own namespaces, so that nothing is left behind."""
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{i} node{i}\n" for i in range(1, MACHINES + 1)))
    # No name server can be reached, and asking one takes seconds each time.
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    lines = [f"mount --bind {folder / name} /etc/{name}" for name in ("hosts", "nsswitch.conf")]
    lines += ["mount -t tmpfs none /run", "ip link add br0 type bridge", "ip link set br0 up"]
    for i in range(1, MACHINES + 1):
        lines += [f"ip netns add node{i}", f"ip link add port{i} type veth peer name eth{i}", f"ip link set port{i} master br0 up"]
        lines += [f"ip link set eth{i} netns node{i}", f"ip -n node{i} addr add 10.77.0.{i}/24 dev eth{i}"]
        lines += [f"ip -n node{i} link set eth{i} up", f"ip -n node{i} link set lo up"]
    subprocess.run(["sh", "-ec", "\n".join(lines)], check=True)


class Case:
    """One run with its faults.

    Args:
        folder: of all cases; `data` in it is prepared.
        name: of the run folder.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.recipe, self.run = folder / f"{name}.yaml", folder / name
        self.log = (folder / f"{name}.log").open("ab")
        self.recipe.write_text(config.run_yaml(config.build_run(tree(folder, name))))
        self.started: Processes = []

    def start(self, machine: int, nodes: str, *options: str, host: int = 1) -> subprocess.Popen[bytes]:
        """Start the job's part on a machine; `host` is the one where all meet."""
        command = [sys.executable, "-m", "overnight", "launch", str(self.recipe), "--processes=1", f"--nodes={nodes}", *options]
        command.append(f"--rendezvous=node{host}:29500")
        named = ["ip", "netns", "exec", f"node{machine}", "unshare", "--uts", "sh", "-c", f'hostname node{machine}; exec "$@"', "sh"]
        # Not a member of our group, so that a fault is one machine's.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(named + command, stdout=self.log, stderr=self.log, start_new_session=True, env=environment)
        self.started.append(process)
        return process

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Of the run's metrics."""
        path = self.run / "metrics.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        return [line for line in found if line["kind"] == kind]

    def wait_until(self, said: Callable[[], bool], seconds: float = 120) -> float:
        """Seconds until something is so."""
        begin = time.monotonic()
        while not said():
            if time.monotonic() - begin > seconds:
                raise SystemExit(f"{self.run.name}: waited {seconds} s; the log says\n{Path(self.log.name).read_text()[-3000:]}")
            time.sleep(0.05)
        return time.monotonic() - begin

    def trained(self, steps: int) -> Callable[[], bool]:
        """Whether so many steps are taken."""
        return lambda: any(line["global_step"] >= steps for line in self.lines("train"))

    def resumed(self) -> bool:
        """Whether it has resumed from a checkpoint."""
        return any(line["event"] == "resumed" for line in self.lines("event"))

    def ends(self, *processes: subprocess.Popen[bytes]) -> tuple[list[int], float]:
        """Wait for their end; exit codes and seconds."""
        seconds = self.wait_until(lambda: all(process.poll() is not None for process in processes), 150)
        return [process.returncode for process in processes], round(seconds, 1)

    def end(self) -> None:
        """Leave no process behind."""
        for process in self.started:
            power_off(process)


def tree(folder: Path, name: str) -> dict[str, Any]:
    """A small recipe whose batch can be cut for one, two and three processes."""
    optim = {"name": "lamb", "lr": 0.01, "schedule": {"name": "poly", "warmup_ratio": 0.1}}
    phase = {"steps": STEPS, "global_batch_size": 12, "seq_len": 48, "micro_batch_size": 2, "max_predictions_per_seq": 8, "optim": optim}
    return {
        "name": name,
        "out": str(folder / name),
        "data": {
            "paths": [str(folder / "topics.jsonl")],
            "dir": str(folder / "data"),
            "vocab_size": 600,
            "valid_fraction": 0.2,
            "workers": 1,
        },
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "max_position_embeddings": 48,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "phases": {"short": phase},
        "logging": {"eval_every": 40, "eval_examples": 24, "log_every": 5},
        "checkpoint": {"save_every": 20},
        "compute": {"device": "cpu"},
    }


def power_off(process: subprocess.Popen[bytes]) -> None:
    """End a machine's agent and all its processes at once."""
    if process.poll() is None:
        doomed = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in doomed:
            one.kill()
        process.wait()


def ranks(process: subprocess.Popen[bytes]) -> list[int]:
    """The training processes that an agent has started."""
    return [one.pid for one in psutil.Process(process.pid).children(recursive=True) if "pretrain" in one.cmdline()]


def undisturbed(case: Case, machines: int) -> dict[str, Any]:
    """No fault."""
    codes, seconds = case.ends(*(case.start(i, str(machines)) for i in range(1, machines + 1)))
    return {"codes": codes, "seconds": seconds}


def rank_killed(case: Case) -> dict[str, Any]:
    """kill -9 of one training process; the agents restart all."""
    jobs = [case.start(i, "2", "--restarts=1") for i in (1, 2)]
    case.wait_until(case.trained(STEPS // 4))
    os.kill(ranks(jobs[1])[0], signal.SIGKILL)
    going = case.wait_until(case.resumed)
    return {"resumes after": round(going, 1), "codes": case.ends(*jobs)[0]}


def rank_killed_without_restarts(case: Case) -> dict[str, Any]:
    """The same; the job ends, and the same command continues."""
    jobs = [case.start(i, "2") for i in (1, 2)]
    case.wait_until(case.trained(STEPS // 4))
    os.kill(ranks(jobs[1])[0], signal.SIGKILL)
    codes, seconds = case.ends(*jobs)
    return {"codes": codes, "ends after": seconds, "again": undisturbed(case, 2)["codes"]}


def machine_killed(case: Case) -> dict[str, Any]:
    """kill -9 of all of the machine where the others meet; the job ends, and the same command continues."""
    jobs = [case.start(i, "2") for i in (1, 2)]
    case.wait_until(case.trained(STEPS // 4))
    power_off(jobs[0])
    codes, seconds = case.ends(jobs[1])
    return {"codes": codes, "ends after": seconds, "again": undisturbed(case, 2)["codes"]}


def network_cut(case: Case) -> dict[str, Any]:
    """The cable of a machine is pulled, so that nobody says goodbye; the others end, and the same command continues."""
    jobs = [case.start(i, "2") for i in (1, 2)]
    case.wait_until(case.trained(STEPS // 4))
    subprocess.run(["ip", "link", "set", "port2", "down"], check=True)
    codes, seconds = case.ends(jobs[0])
    power_off(jobs[1])
    subprocess.run(["ip", "link", "set", "port2", "up"], check=True)
    return {"codes": codes, "ends after": seconds, "again": undisturbed(case, 2)["codes"]}


def signalled(case: Case) -> dict[str, Any]:
    """SIGUSR1 to one agent: all end with 138 and a checkpoint, and the same command continues."""
    jobs = [case.start(i, "2", "--restarts=3") for i in (1, 2)]
    case.wait_until(case.trained(STEPS // 4))
    psutil.Process(jobs[1].pid).send_signal(signal.SIGUSR1)
    codes, seconds = case.ends(*jobs)
    return {"codes": codes, "ends after": seconds, "again": undisturbed(case, 2)["codes"]}


def machine_leaves(case: Case) -> dict[str, Any]:
    """Elastic, 1:2: kill -9 of all of machine 1, which has the first process; machine 2 continues alone."""
    jobs = [case.start(i, "1:2", "--restarts=3", host=2) for i in (2, 1)]
    case.wait_until(case.trained(STEPS // 4))
    power_off(jobs[1])
    going = case.wait_until(case.resumed)
    return {"resumes after": round(going, 1), "codes": case.ends(jobs[0])[0]}


def machine_comes(case: Case) -> dict[str, Any]:
    """Elastic, 2:3: machines 2 and 3 begin; machine 1 comes and has the first process from then on."""
    jobs = [case.start(i, "2:3", host=2) for i in (2, 3)]
    case.wait_until(case.trained(STEPS // 8))
    jobs.append(case.start(1, "2:3", host=2))
    going = case.wait_until(case.resumed)
    return {"resumes after": round(going, 1), "codes": case.ends(*jobs)[0]}


CASES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "undisturbed, 1 machine": lambda case: undisturbed(case, 1),
    "undisturbed, 2 machines": lambda case: undisturbed(case, 2),
    "process killed, 1 restart": rank_killed,
    "process killed, no restart": rank_killed_without_restarts,
    "machine killed": machine_killed,
    "network cut": network_cut,
    "SIGUSR1": signalled,
    "elastic 1:2, machine killed": machine_leaves,
    "elastic 2:3, machine comes": machine_comes,
}
# The number of processes changes on the way, so additions happen in another order.
ELASTIC = ("elastic 1:2, machine killed", "elastic 2:3, machine comes", "undisturbed, 1 machine")


def distance(case: Case, reference: Case) -> dict[str, Any]:
    """How far the newest parameters and optimizer state, and the curve, are from the reference."""
    places = [reader.newest_checkpoint(one.run / "checkpoints") for one in (case, reference)]
    assert None not in places
    ours, theirs = ({**model, **state} for _, model, state in (reader.read_checkpoint(place) for place in places if place))
    a, b = (torch.cat([tensors[name].double().flatten() for name in theirs]) for tensors in (ours, theirs))
    same = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rows = list(zip(case.lines("train"), reference.lines("train"), strict=True))
    assert all(x["global_step"] == y["global_step"] for x, y in rows)
    return {
        "bitwise": same and all(x["loss"] == y["loss"] for x, y in rows),
        "parameters": float((a - b).norm() / b.norm()),
        "loss": max(abs(x["loss"] - y["loss"]) / y["loss"] for x, y in rows),
    }


def inside(folder: Path, wanted: list[str]) -> None:
    """All cases, in the namespaces."""
    make_network(folder)
    (folder / "topics.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for _, t in sorted(pydoc_data.topics.topics.items())))
    run = config.build_run(tree(folder, "x"))
    prepare(run.data, run.data_dir, log=lambda text: None)
    found: dict[str, Any] = {}
    done: dict[str, Case] = {}
    for number, (name, play) in enumerate(CASES.items()):
        if wanted and name not in wanted and name != "undisturbed, 2 machines":
            continue
        case = done[name] = Case(folder, f"case{number}")
        begin = time.monotonic()
        try:
            found[name] = play(case)
        finally:
            case.end()
        found[name]["wall"] = round(time.monotonic() - begin, 1)
        print(f"{name}: {found[name]}", flush=True)
    for name, case in done.items():
        found[name] |= distance(case, done["undisturbed, 2 machines"])
    table(found)
    if not wanted:
        (folder / "result.json").write_text(json.dumps({"environment": environment(), "cases": found}, indent=1) + "\n")
    wrong = [name for name, row in found.items() if not (row["parameters"] < 1e-4 if name in ELASTIC else row["bitwise"])]
    if wrong:
        raise SystemExit(f"not the result of the undisturbed run: {', '.join(wrong)}")


def table(found: dict[str, Any]) -> None:
    """Print what was measured."""
    print(f"\n{'case':30} {'exit codes':>14} {'ends after':>11} {'resumes after':>14} {'bitwise':>8} {'parameters':>11} {'loss':>8}")
    for name, row in found.items():
        codes = ", ".join(map(str, row["codes"]))
        seconds = [f"{row[key]:.1f} s" if key in row else "" for key in ("ends after", "resumes after")]
        print(
            f"{name:30} {codes:>14} {seconds[0]:>11} {seconds[1]:>14} {'yes' if row['bitwise'] else 'no':>8} "
            f"{row['parameters']:>11.0e} {row['loss']:>8.0e}"
        )


def main() -> None:
    """Enter own namespaces, run the cases, keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", help="names of cases; all by default, and then kept")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside, options.case)
        return
    with tempfile.TemporaryDirectory() as name:
        again = [sys.executable, __file__, f"--inside={name}", *options.case]
        done = subprocess.run(["unshare", "--user", "--map-root-user", "--net", "--mount", *again], check=False)
        if done.returncode == 0 and not options.case:
            out = Path(__file__).parent / "results" / f"{date.today()}-cpu{psutil.cpu_count()}-two-nodes"
            out.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(name) / "result.json", out / "result.json")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
