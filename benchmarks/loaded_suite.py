"""Run `make test` many times on a busy machine, and name every test that fails.

    python -m benchmarks.loaded_suite                        20 runs, two at a time: about two hours on two cores
    python -m benchmarks.loaded_suite --runs 2 --beside 1    a look
    python -m benchmarks.loaded_suite --out FOLDER           those that FOLDER/result.json lacks of 20

Each run is of the last commit, in one of a few clones with environments of their own; so the checkout may be edited meanwhile. Runs in different clones begin
half a run apart, and each keeps both cores busy, so none ever has a core to itself. Into benchmarks/results/<date>-cpu<N>-loaded-suite/result.json go, after
every run, its commit, its seconds, the load of the machine in the middle of it, how many tests passed, and the lines of those that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

from overnight.run_dir.environment import environment

ROOT = Path(__file__).parent.parent
_FAILED = re.compile(r"^(?:FAILED|ERROR) .*", re.MULTILINE)
_COUNTS = re.compile(r"^(?=.*\d+ passed)(.*) in [\d.]+s", re.MULTILINE)


def outcome(code: int, output: str) -> dict[str, Any]:
    """Return what `make test` came to: its exit code, pytest's own summary, and the lines of tests that failed."""
    counts = _COUNTS.findall(output)
    return {"exit_code": code, "tests": counts[-1].strip(" =") if counts else "none ended", "failed": _FAILED.findall(output)}


def one_run(clone: Path, variables: dict[str, str]) -> dict[str, Any]:
    """Run `make test` once in a clone; its output is kept beside the clone where it fails."""
    begun, loads = time.monotonic(), []
    with (clone.parent / f"{clone.name}.log").open("w+") as log:
        command = ["make", "test", "PYTEST_ARGS=-rfE"]
        with subprocess.Popen(command, cwd=clone, env=variables, stdout=log, stderr=subprocess.STDOUT) as process:
            while process.poll() is None:
                loads.append(os.getloadavg()[0])
                time.sleep(10)
        log.seek(0)
        output = log.read()
    found = outcome(process.returncode, output)
    if process.returncode:
        (clone.parent / f"{clone.name}-{int(time.time())}.failed.log").write_text(output)
    middle = sorted(loads)[len(loads) // 2]
    return {"seconds": round(time.monotonic() - begun), "load": round(middle, 1), **found}


def main() -> int:
    """Run the suite so many times, and return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--beside", type=int, default=2, help="runs at the same time")
    parser.add_argument(
        "--work", type=Path, default=Path("runs/loaded-suite"), help="folder of the clones and of the output of runs that failed"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder of result.json")
    args = parser.parse_args()
    out = args.out or ROOT / "benchmarks" / "results" / f"{date.today()}-cpu{os.cpu_count()}-loaded-suite"
    out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    variables = {**os.environ, "OVERNIGHT_DATA": os.environ.get("OVERNIGHT_DATA", str(ROOT.parent / "shared" / "data"))}
    clones = [(args.work / f"clone-{number}").resolve() for number in range(args.beside)]
    for clone in clones:
        if not clone.exists():
            subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "fetch", "-q"], cwd=clone, check=True)
        subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=clone, check=True)
        subprocess.run(["make", "install"], cwd=clone, check=True, stdout=sys.stderr)
    path = out / "result.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    lock, begun = threading.Lock(), [len(found)]

    def take_turns(clone: Path, wait: float) -> None:
        time.sleep(wait)
        while True:
            with lock:
                if begun[0] >= args.runs:
                    return
                begun[0] += 1
            result = {"commit": commit, **one_run(clone, variables)}
            with lock:
                found.append(result)
                print(
                    f"run {len(found)}: {result['tests']}, {result['seconds']} s, load {result['load']}",
                    *result["failed"],
                    sep="\n  ",
                    flush=True,
                )
                path.write_text(json.dumps({"environment": environment(), "beside": args.beside, "runs": found}, indent=1) + "\n")

    threads = [threading.Thread(target=take_turns, args=(clone, 300.0 * number)) for number, clone in enumerate(clones)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(any(run["exit_code"] for run in found))


if __name__ == "__main__":
    sys.exit(main())
