"""A program whose workers are in a task until a file appears: `python -m tests.corpus.busy_command FOLDER [thread]`.

With `thread`, a thread of it gets a Ctrl-C while the main one waits for the workers, as when the system gives a signal to another thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from overnight.cli import machine_commands
from overnight.cli.main import command
from overnight.corpus.workers import run_tasks

WAITS = "waits for its workers\n"
"""What it says when it has been stopped."""


def work(folder: str) -> None:
    """Be in a task, of which a file by the number of the process tells, until there is a file `end`."""
    Path(folder, str(os.getpid())).touch()
    while not Path(folder, "end").exists():
        time.sleep(0.01)


def interrupt() -> None:
    """Get a Ctrl-C in this thread, once the main one waits."""
    time.sleep(0.5)
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    """Run it as a command of the program."""
    (folder, *more_words), shutdown = sys.argv[1:], ProcessPoolExecutor.shutdown

    def told(pool: ProcessPoolExecutor, *arguments: Any, **more: Any) -> None:
        print(WAITS, end="", flush=True)
        if more_words:
            threading.Thread(target=interrupt).start()
        shutdown(pool, *arguments, **more)

    ProcessPoolExecutor.shutdown = told  # type: ignore[method-assign]
    machine_commands._doctor = lambda *_: list(run_tasks(work, [folder] * 9, 2))  # type: ignore[assignment, return-value]
    sys.argv = ["overnight", "doctor"]
    command()


if __name__ == "__main__":
    main()
