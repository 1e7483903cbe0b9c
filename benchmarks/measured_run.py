"""Run commands of `overnight` on a recipe and keep what they cost: wall time and peak memory of all their processes.

    python benchmarks/measured_run.py demo run
    OVERNIGHT_DATA=... python benchmarks/measured_run.py bert-mini-books prepare pretrain

Into benchmarks/results/<date>-<machine>-<recipe>/ go result.json (environment, seconds and peak memory by command, last held-out scores, peak
memory as the sum of resident sizes sampled every 0.2 s: shared pages count once a process, so it is an upper bound), metrics.jsonl, tasks.jsonl, run.yaml.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import psutil

from overnight import config
from overnight.report.summary import summarise
from overnight.run_dir.environment import environment


def measured(command: list[str]) -> dict[str, float]:
    """Run a command to its end; its wall time (s) and the peak of the resident memory of its process tree (GB)."""
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command)
    tree = psutil.Process(process.pid)
    while process.poll() is None:
        resident = 0
        try:
            for one in [tree, *tree.children(recursive=True)]:
                resident += one.memory_info().rss
        except psutil.Error:
            pass  # A process that ended between the two calls.
        peak = max(peak, resident)
        time.sleep(0.2)
    if process.returncode:
        sys.exit(process.returncode)
    return {"seconds": round(time.perf_counter() - start, 1), "peak_gb": round(peak / 1e9, 3)}


def main() -> None:
    """Run the commands and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("commands", nargs="+", choices=["prepare", "pretrain", "run"])
    parser.add_argument("--machine", default=f"cpu{psutil.cpu_count()}", help="word for the machine in the name of the results folder")
    options, overrides = parser.parse_known_args()
    run = config.load_run(options.recipe, [o.removeprefix("--") for o in overrides])
    costs = {name: measured([sys.executable, "-m", "overnight", name, options.recipe, *overrides]) for name in options.commands}
    out = Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-{run.name}"
    out.mkdir(parents=True, exist_ok=True)
    kept = [name for name in ("metrics.jsonl", "tasks.jsonl", "run.yaml") if (run.run_dir / name).exists()]
    for name in kept:
        shutil.copyfile(run.run_dir / name, out / name)
    summary = summarise(run.run_dir) if kept else {}
    command = ["overnight", *options.commands, options.recipe, *overrides]
    result = {
        "command": command,
        "environment": environment(),
        "costs": costs,
        "phases": summary.get("phases"),
        "tasks": summary.get("tasks"),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(costs))


if __name__ == "__main__":
    main()
