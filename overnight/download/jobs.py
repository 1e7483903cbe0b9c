"""What is to do for the files that are wanted: nothing where one is there as it came, or as it is published."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from overnight.download.datasets import Dataset, RemoteFile
from overnight.download.manifest import Entry, Manifest, now, sha256_of
from overnight.download.selection import SelectedDataset
from overnight.download.transfer import DiskFullError, Received, part_size
from overnight.errors import DataError


def megabytes(count: int) -> str:
    """Return a number of bytes as people say it."""
    return f"{count / 1e6:,.1f} MB"


@dataclass
class Job:
    """A file to get, and how far it is."""

    dataset: Dataset
    file: RemoteFile
    name: str
    """Below the folder; of an archive to unpack, that of the archive, which is not kept."""
    total: int = 0
    done: int = 0
    state: str = "waiting"
    failed: Exception | None = None


def jobs_of(selected: Sequence[SelectedDataset], folder: Path, manifest: Manifest, verify: bool, log: Callable[[str], None]) -> list[Job]:
    """Return what is to get, and record what someone has put there by hand.

    Args:
        selected: the datasets and their files.
        folder: where they belong.
        manifest: of that folder.
        verify: read what is there, even if it has not been written since it came.
        log: takes a line for the user.

    Raises:
        DataError: a file is in the way that did not come from here and is not what is published.
        DiskFullError: there is no room for what is to come, as far as sizes are known.
    """
    jobs = [job for one in selected for file in one.files if (job := _job(one.dataset, file, folder, manifest, verify, log))]
    coming = sum(max(0, job.total - part_size(folder / job.name)) for job in jobs)
    if coming > (free := shutil.disk_usage(folder).free):
        text = f"{folder}: has {megabytes(free)} free, but {megabytes(coming)} must be downloaded"
        raise DiskFullError(f"{text}; make room, or name another folder with --to")
    return jobs


def _job(dataset: Dataset, file: RemoteFile, folder: Path, manifest: Manifest, verify: bool, log: Callable[[str], None]) -> Job | None:
    if _is_there(file, manifest, verify):
        return None
    path = folder / file.path
    if not file.unpack and path.exists():
        if file.path not in manifest.files:
            _adopt(dataset, file, path, manifest)
            log(f"{path}: was already there, and is what is published")
            return None
        log(f"{path}: differs from what was downloaded, or from what is published now; downloading it again")
    name = f"{file.path}/{file.address.rpartition('/')[2]}" if file.unpack else file.path
    return Job(dataset, file, name, file.size or 0)


def _is_there(file: RemoteFile, manifest: Manifest, verify: bool) -> bool:
    entries = {path: entry for path, entry in manifest.files.items() if entry.address == file.address}
    if file.checksum and any(entry.published_checksum != file.checksum for entry in entries.values()):
        return False
    # All of an archive was recorded at once.
    paths = [path for path, entry in entries.items() if bool(entry.member) == bool(file.unpack)]
    return bool(paths) and all([manifest.is_whole(path, verify) for path in paths])


def _adopt(dataset: Dataset, file: RemoteFile, path: Path, manifest: Manifest) -> None:
    """Record a file that someone has put there, if it is what is published."""
    kind, _, digits = file.checksum.partition(":")
    if not digits:
        raise DataError(f"{path}: exists, but no checksum is published that would tell whether it is whole; move it away to download it")
    with open(path, "rb") as content:
        found = hashlib.file_digest(content, kind).hexdigest()
    if found != digits:
        raise DataError(
            f"{path}: exists and differs from what is published (its {kind} is {found}, not {digits}); move it away to download it"
        )
    manifest.add({file.path: entry_of(dataset, file, Received(path, path.stat().st_size, sha256_of(path)))})


def entry_of(dataset: Dataset, file: RemoteFile, received: Received, member: str = "") -> Entry:
    """Return what is recorded of a file that is whole.

    Args:
        dataset, file: what it is.
        received: the file, under whichever name it has now.
        member: its name in the archive, if it was unpacked.
    """
    changed = received.path.stat().st_mtime_ns
    known = (file.checksum, dataset.license, dataset.citation)
    return Entry(dataset.name, file.address, received.size, received.sha256, changed, now(), *known, member)
