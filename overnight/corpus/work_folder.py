"""The intermediate files of a preparation, in `work/` below the data folder, and what of a data folder is its own."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from overnight.corpus import document_table
from overnight.corpus.cluster import settle
from overnight.corpus.shards import SPLITS
from overnight.corpus.workers import Workers
from overnight.errors import DataError
from overnight.run_dir.atomic import is_unfinished, remove_unfinished, write_json
from overnight.run_dir.lock import preparation_lock
from overnight.state_files import read_json


def begin(folder: Path, state: str, log: Callable[[str], None], workers: Workers) -> None:
    """Keep what an interrupted preparation of the same kind left, and clear away that of another.

    Args:
        folder: of the prepared data.
        state: hash of all that the intermediate files depend on.
        log: called with a line that says which it is.
        workers: of the other one, none of which may write any more.

    Raises:
        DataError: the folder has files of these names that no preparation left there.
    """
    marker = folder / "work" / "state.json"
    if marker.exists() and read_json(marker, str, f"delete the folder {folder} and prepare again") == state:
        log(f"prepare: continuing in {folder}")
        return
    left = [
        folder / "manifest.json",
        folder / "drops.json",
        folder / document_table.NAME,
        folder / "vocab.txt",
        folder / "tokenizer.json",
        *(path for split in SPLITS for path in folder.glob(f"{split}-*.arrow")),
    ]
    left = [path for path in left if path.exists()]
    if not marker.exists():
        # A preparation may be killed before its marker has its name.
        foreign = [marker.parent] if any(not is_unfinished(path) for path in marker.parent.glob("*")) else []
        if not (folder / "manifest.json").exists():
            foreign += [*left, *folder.glob("report.html")]
        if foreign:
            raise DataError(f"{folder}: holds {foreign[0].name}, which no preparation left there; set data.dir to another folder")
    if marker.exists():
        log(f"prepare: {folder} holds the beginning of a preparation with other settings or sources; starting anew")
        write_json(marker, "")  # from here on no worker begins a task of it
        settle(workers)
    for path in left:
        path.unlink()
    clear(marker.parent)
    write_json(marker, state)


def clear(work: Path) -> None:
    """Remove the intermediate files of a preparation, its marker last: a folder `work` without one may be somebody's own."""
    marker = work / "state.json"
    if not marker.exists():
        return
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != marker:
            path.unlink(missing_ok=True)
    marker.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        work.rmdir()


def tidy(folder: Path) -> None:
    """Remove from a prepared folder what a preparation left that was killed behind its manifest.

    Nothing is removed where another process has the lock: it may be just about to end. Nor from a folder that may only be read, where it does no harm.
    """
    if not (folder / "work" / "state.json").exists() and not any(map(is_unfinished, folder.glob("*.tmp"))):
        return
    with contextlib.suppress(DataError, OSError), preparation_lock(folder):
        clear(folder / "work")
        remove_unfinished(folder)
