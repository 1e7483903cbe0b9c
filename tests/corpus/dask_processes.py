"""The processes of a small Dask cluster, each of its own, as functions for :class:`tests.processes.Process`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

from overnight.config import Data
from overnight.corpus import cluster, pipeline, wikipedia_dump
from overnight.errors import UserError


def small_tasks() -> None:
    """Make many tasks of little text, and say soon that nobody works on them."""
    pipeline.CHUNK_BYTES, wikipedia_dump._PACKED_BYTES, cluster._REMIND_AFTER = 10_000, 2000, 0.5


def scheduler(port: int) -> None:
    """Run a scheduler on a port of this machine, or on any for 0; print its address."""
    from distributed import Scheduler

    async def run() -> None:
        async with Scheduler(host="127.0.0.1", port=port, dashboard=False, dashboard_address="127.0.0.1:0") as one:
            print(one.address, flush=True)
            await one.finished()

    _quiet()
    asyncio.run(run())


def worker(address: str, folder: Path, unlike: str = "") -> None:
    """Run a worker of one thread; print a line once it works.

    Args:
        address: of the scheduler.
        folder: where it is; not that of the command.
        unlike: `version` has another version of a library, `package` lacks the package.
    """
    from distributed import Worker

    async def run() -> None:
        async with Worker(
            address, nthreads=1, local_directory=str(folder), memory_limit=0, dashboard=False, dashboard_address="127.0.0.1:0"
        ) as one:
            print("working", flush=True)
            await one.finished()

    _quiet()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    if unlike == "version":
        found = {**cluster.program(), "tokenizers": "0.0.1"}
        cluster.program = lambda: found  # type: ignore[assignment]
    if unlike == "package":
        sys.modules["overnight.corpus.cluster"] = None  # type: ignore[assignment]
    asyncio.run(run())


def command(data: Data, folder: Path) -> None:
    """Prepare as the command does: lines, and at an error its message and exit code."""
    small_tasks()
    try:
        pipeline.prepare(data, folder, lambda line: print(line, flush=True), shard_tokens=1000)
    except UserError as error:
        print("refused:", error, flush=True)
        sys.exit(error.exit_code)


def _quiet() -> None:
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
