"""Workers that are forked from a process of their own kind, which has imported what all of them begin with: `python -m tests.forks MODULE...`

For what must be settled before torch or Triton is imported, and so not in the process of :mod:`tests.processes`.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path

from tests.processes import HANG

ROOT = Path(__file__).parent.parent


class Forks:
    """A process with modules imported, each worker of which is a fork of it; it ends with the pipe to it.

    Args:
        modules: what it imports, in this order.
        folder: where the output of a worker lies.
        options: of Python.
        environment: the whole of it.
    """

    def __init__(self, modules: list[str], folder: Path, options: list[str], environment: dict[str, str]) -> None:
        command = [sys.executable, *options, "-m", "tests.forks", *modules]
        self._output = folder / "output"
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, worker: str, *arguments: str) -> tuple[int, str]:
        """Do what `python -m WORKER ARGUMENTS` does; return its exit code and what it wrote."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(self._output), worker, *arguments]) + "\n")
        self._process.stdin.flush()
        watch = threading.Timer(HANG, self._process.kill)
        watch.start()
        try:
            code = self._process.stdout.readline()
        finally:
            watch.cancel()
        return int(code or 1), self._output.read_text(errors="replace") if code else "the process that forks them has ended"

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def _work(output: str, worker: str, arguments: list[str]) -> None:
    """Be the worker, as a process that was just forked."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.argv, code = [worker, *arguments], 1
    try:
        runpy.run_module(worker, run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    gc.disable()
    for name in sys.argv[1:]:
        import_module(name)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _output, _worker, *_arguments = json.loads(line)
            _work(_output, _worker, _arguments)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
