"""End processes that train together in every way they can end, hundreds of times, and count their exit codes.

    python -m benchmarks.process_ends              200 ends of each kind, about 15 minutes on two cores
    python -m benchmarks.process_ends --ends 3     a look

Two processes train a tiny network over gloo. gloo's thread drops the tensors of a collective a moment after the collective is done, and needs
the interpreter for it; a library that is loaded first (`late.c` below, built with the C compiler) makes this moment longer, from nothing
to 20 ms, so that the ends that seldom meet it do. The processes are forked from one that has torch imported already, and
end as `python -m overnight` ends, exactly. Into benchmarks/results/<date>-cpu<N>-process-ends/result.json go the environment and, for each kind,
how often the two processes ended with which exit codes. Needs Linux, a C compiler, and a Python with a shared libpython.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

_LATE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void late(void) {
    char name[32] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (!strncmp(name, "pt_gloo", 7) && getenv("LATE_US")) usleep(atoi(getenv("LATE_US")));
}
static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }
int PyGILState_Ensure(void) { late(); return ((int (*)(void))next("PyGILState_Ensure"))(); }
void PyEval_AcquireThread(void *state) { late(); ((void (*)(void *))next("PyEval_AcquireThread"))(state); }
void PyEval_RestoreThread(void *state) { late(); ((void (*)(void *))next("PyEval_RestoreThread"))(state); }
void _ZNSt18condition_variable10notify_allEv(void *self) {
    static void (*real)(void *);
    if (!real) real = (void (*)(void *))dlsym(dlopen("libstdc++.so.6", RTLD_NOW), "_ZNSt18condition_variable10notify_allEv");
    real(self);
    late();
}
"""
_DELAYS = (0, 300, 1000, 5000, 20000)
"""Microseconds by which gloo's thread is late, in turn."""
_WITHIN = 600.0
"""Seconds after which an end counts as none."""
KINDS: dict[str, tuple[tuple[int, int], list[str], tuple[int, int]]] = {
    # exit codes expected; overrides; the rank that gets a signal in its third step, and which
    "normal end": ((0, 0), [], (-1, 0)),
    "wrong recipe": ((2, 2), ["logging.grad_noise_every=1"], (-1, 0)),
    "SIGTERM to one": ((143, 143), [], (1, signal.SIGTERM)),
    "kill -9 of one": ((1, -9), [], (1, signal.SIGKILL)),
}


def tree(folder: Path) -> dict[str, Any]:
    """A network that trains in a moment."""
    phase = {
        "steps": 4,
        "global_batch_size": 4,
        "seq_len": 32,
        "micro_batch_size": 1,
        "max_predictions_per_seq": 5,
        "optim": {"name": "lamb", "lr": 0.01},
    }
    return {
        "name": "ends",
        "out": str(folder / "run"),
        "data": {
            "paths": [str(folder / "topics.jsonl")],
            "dir": str(folder / "data"),
            "vocab_size": 600,
            "valid_fraction": 0.2,
            "workers": 1,
        },
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "max_position_embeddings": 32},
        "phases": {"short": phase},
        "logging": {"eval_every": 4, "eval_examples": 4, "log_every": 1},
        "checkpoint": {"save_every": 100},
        "compute": {"threads": 1, "device": "cpu"},
    }


def process(rank: int, place: socket.socket, argv: list[str], log: Path, late: int, victim: int, number: int) -> int:
    """Fork one of two processes of a job, which ends as `python -m overnight` does; returns its number."""
    if child := os.fork():
        return child
    from overnight.engine import loop

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LATE_US": str(late), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place.getsockname()[1])}
    if rank == 0:
        os.environ["OVERNIGHT_LISTEN_FD"] = str(place.detach())
    else:
        place.close()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if rank == victim:
        loop.clip_and_step = signalled(loop.clip_and_step, number)
    sys.argv = ["overnight", *argv]
    from overnight.cli import main

    if hasattr(main, "command"):
        main.command()
    sys.exit(main.main())


def signalled(step: Callable[..., Any], number: int) -> Callable[..., Any]:
    """An optimizer step that sends this process a signal the third time."""
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), number)
        return step(*args, **kwargs)

    return wrapped


def ended(children: list[int]) -> tuple[str, ...]:
    """The exit codes of processes, `hangs` where one does not end."""
    codes: dict[int, str] = {}
    deadline = time.monotonic() + _WITHIN
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = str(os.waitstatus_to_exitcode(status))
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[child] = "hangs"
        time.sleep(0.01)
    return tuple(codes[child] for child in children)


def expected(kind: str) -> str:
    """The exit codes that docs/cluster.md promises."""
    return " ".join(map(str, KINDS[kind][0]))


def campaign(folder: Path, ends: int, delays: list[int]) -> dict[str, dict[str, int]]:
    """All kinds; for each, how often the two processes ended with which codes."""
    import yaml

    from overnight import config
    from overnight.corpus.pipeline import prepare

    (folder / "topics.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for _, t in sorted(pydoc_data.topics.topics.items())))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree(folder)))
    run = config.load_run(str(folder / "recipe.yaml"))
    prepare(run.data, run.data_dir, log=lambda text: None)
    # What the children have without importing it.
    import overnight.cli.main
    import overnight.engine.pretrain  # noqa: F401

    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for number in range(ends):
        late, jobs = delays[number % len(delays)], {}
        for kind, (_, overrides, (victim, which)) in KINDS.items():  # one of each kind at once
            here = folder / kind.replace(" ", "-")
            here.mkdir()
            argv = ["pretrain", str(folder / "recipe.yaml"), f"--out={here}/run", *(f"--{override}" for override in overrides)]
            with socket.create_server(("127.0.0.1", 0)) as place:
                jobs[kind] = here, [process(rank, place, argv, here / "log", late, victim, which) for rank in range(2)]
        for kind, (here, children) in jobs.items():
            codes = " ".join(ended(children))
            found[kind][codes] += 1
            if codes != expected(kind):
                print(f"{number}: {kind}, {late} us late: {codes}\n{(here / 'log').read_text()[-9000:]}", flush=True)
            shutil.rmtree(here)
    return {kind: dict(counts) for kind, counts in found.items()}


def main() -> None:
    """Build the library, start again with it, run the campaign, keep the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ends", type=int, default=200, help="of each kind")
    parser.add_argument("--late", type=int, nargs="+", default=list(_DELAYS), metavar="US", help="microseconds, in turn")
    parser.add_argument("--out", type=Path, help="folder of the result; default benchmarks/results/<date>-cpu<N>-process-ends")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        with tempfile.TemporaryDirectory() as name:
            (Path(name) / "late.c").write_text(_LATE)
            library = f"{name}/late.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, f"{name}/late.c", "-ldl"], check=True)
            environment = {**os.environ, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1"}
            again = [sys.executable, "-m", "benchmarks.process_ends", f"--inside={name}", *sys.argv[1:]]
            sys.exit(subprocess.run(again, env=environment, check=False).returncode)
    begin = time.monotonic()
    found = campaign(options.inside, options.ends, options.late)
    os.environ.pop("LD_PRELOAD")
    from overnight.run_dir.environment import environment as machine

    result = {"environment": machine(), "ends": options.ends, "microseconds late": options.late, "seconds": round(time.monotonic() - begin)}
    result["exit codes"] = {kind: {"expected": expected(kind), "found": counts} for kind, counts in found.items()}
    print(json.dumps(result["exit codes"], indent=1))
    out = options.out or Path(__file__).parent / "results" / f"{date.today()}-cpu{os.cpu_count()}-process-ends"
    out.mkdir(parents=True, exist_ok=True)
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    if any(set(counts) != {expected(kind)} for kind, counts in found.items()):
        raise SystemExit("some processes did not end as they should")


if __name__ == "__main__":
    main()
