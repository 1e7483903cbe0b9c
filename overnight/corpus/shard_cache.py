"""Prepared data in storage (`data.dir: s3://bucket/folder`), copied into a folder of this machine before it is read.

An epoch is in one random order over all shards, so each step reads from all of them: what a run reads has to be here as a whole, and what the bound of the
cache takes away is other data. A copy is a folder `NAME-HASH-HASH`, of the address and of the manifest: data that was prepared anew is another copy. A file of it
appears by rename, once its size and checksum are those of the manifest, which comes last. The processes of a machine share it: one fetches while
the others wait, and a copy that one of them reads, by a lock that ends with the process, is never taken away.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TextIO, TypeVar

import xxhash

from overnight.config import Data, environment_path, environment_text
from overnight.corpus import places
from overnight.corpus.bytes import VOCABULARY_HASH
from overnight.corpus.shards import ARRIVING, Manifest, ShardEntry, load_manifest
from overnight.corpus.tokenizer import load_vocabulary
from overnight.errors import ConfigError, DataError
from overnight.run_dir.atomic import FULL, how_to_make_room, write_whole
from overnight.run_dir.lock import try_lock

_BLOCK = 4 << 20
_VOCABULARY = ("vocab.txt", "tokenizer.json")
# Files that are fetched at once.
_AT_ONCE = 4
# Seconds before each further try.
_PAUSES = (1.0, 5.0, 20.0)
# Counted for the files of a copy that the manifest does not list (bytes).
_OTHER_FILES = 8 << 20
_COPY = re.compile(r".+-[0-9a-f]{12}-[0-9a-f]{12}", re.S)
# Locks of the copies that this process reads: they end with it.
_read_here: dict[Path, TextIO] = {}

Result = TypeVar("Result")


class _Differs(Exception):
    """A file did not arrive as it is in storage, or as the manifest has it."""


def local_copy(data: Data, run: str, log: Callable[[str], None] | None = None) -> Path:
    """Return a folder with the prepared data of an address, which stays there as long as this process lives.

    Args:
        data: with the address in `dir`.
        run: name of the run, for `{name}` in it.
        log: called with lines that say what is fetched; by default they go to standard error.

    Raises:
        ConfigError: when a variable in a path is not set, or the cache cannot be written and has no whole copy.
        DataError: when the storage cannot be read, holds no prepared data or damaged files, or the cache has no room.
    """
    address = environment_text(data.dir.replace("{name}", run), "data.dir").rstrip("/")
    root = environment_path(data.cache, "data.cache")
    log = log or (lambda text: print(text, file=sys.stderr, flush=True))
    manifest = _tried(address, "manifest.json", log, lambda: _whole(address, "manifest.json"))
    hashes = [hashlib.blake2b(known, digest_size=6).hexdigest() for known in (address.encode(), manifest)]
    folder = root / "-".join([PurePosixPath(address).name or "data", *hashes])
    if folder in _read_here:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, "changed"):
            _fetch(address, folder, manifest, int(data.cache_gb * 1e9), log)
            _hold(folder, used := _open_lock(folder, "read"))
            os.utime(used.name)
    except OSError as error:
        if error.errno in FULL:
            raise DataError(
                f"{root}: cannot write ({error.strerror}); {how_to_make_room(error.errno)}, or name another folder with data.cache"
            ) from None
        if not _is_whole(folder, manifest):
            raise ConfigError(f"data.cache = {root}: cannot be written ({error.strerror}); name another folder") from None
        with suppress(OSError):  # a copy on a place that may only be read, perhaps without the file of the lock
            _hold(folder, _open_lock(folder, "read", to_read=True))
    return folder


def _hold(folder: Path, used: TextIO) -> None:
    """Keep a copy from being taken away as long as this process lives, by a file of its lock."""
    fcntl.flock(used, fcntl.LOCK_SH)
    _read_here[folder] = used


def _fetch(address: str, folder: Path, manifest: bytes, limit: int, log: Callable[[str], None]) -> None:
    """Fetch what a copy lacks, or has in another size or with another vocabulary than the manifest says."""
    write_whole(folder / ARRIVING / "manifest.json", [manifest])
    known = load_manifest(folder / ARRIVING)
    if bad := next((entry.name for entry in known.shards if Path(entry.name).name != entry.name), ""):
        raise DataError(f"{address}/manifest.json: names a shard {bad!r}, which is not a file name; prepare again")
    lacking, has_vocabulary = _lacking(folder, known)
    if lacking or not has_vocabulary:
        _make_room(folder, sum(entry.bytes for entry in known.shards) + _OTHER_FILES, limit, log)
        log(
            f"fetch: {len(lacking)} of {len(known.shards)} shards of {address}, {sum(e.bytes for e in lacking) / 1e6:,.1f} MB, into {folder}"
        )
        if not has_vocabulary:
            _tried(address, "vocab.txt", log, lambda: _fetch_vocabulary(address, folder, known.tokenizer))
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda entry: _fetch_shard(address, folder, entry, log), lacking))
    write_whole(folder / "manifest.json", [manifest])  # last: its presence says that the rest is there


def _lacking(folder: Path, known: Manifest) -> tuple[list[ShardEntry], bool]:
    """Return the shards that a copy lacks or has in another size, and whether it has the right vocabulary."""
    has_vocabulary = known.tokenizer in (VOCABULARY_HASH, _vocabulary_of(folder))
    return [entry for entry in known.shards if _size(folder / entry.name) != entry.bytes], has_vocabulary


def _is_whole(folder: Path, manifest: bytes) -> bool:
    """Return whether a copy has all that the manifest says."""
    path = folder / "manifest.json"
    return path.is_file() and path.read_bytes() == manifest and _lacking(folder, load_manifest(folder)) == ([], True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _vocabulary_of(folder: Path) -> str:
    """Return the hash of the vocabulary of a copy, none where it is not whole."""
    try:
        return load_vocabulary(folder).hash
    except DataError:
        return ""


def _fetch_vocabulary(address: str, folder: Path, wanted: str) -> None:
    for name in _VOCABULARY:
        write_whole(folder / name, [_whole(address, name)])
    if (found := _vocabulary_of(folder)) != wanted:
        for name in _VOCABULARY:
            (folder / name).unlink()
        raise _Differs(f"is with tokenizer.json the vocabulary {found or '(damaged)'}, but the manifest says {wanted}")


def _fetch_shard(address: str, folder: Path, entry: ShardEntry, log: Callable[[str], None]) -> None:
    def once() -> None:
        with _opened(address, entry.name) as (blocks, _):
            write_whole(folder / entry.name, _checked(blocks, entry))

    _tried(address, entry.name, log, once)


def _checked(blocks: Iterator[bytes], entry: ShardEntry) -> Iterator[bytes]:
    """Yield the bytes of a shard, and at their end see that they are what the manifest says."""
    state, size = xxhash.xxh3_64(), 0
    for block in blocks:
        state.update(block)
        size += len(block)
        yield block
    if (size, state.hexdigest()) != (entry.bytes, entry.checksum):
        raise _Differs(
            f"has {size:,} bytes with the checksum {state.hexdigest()}, but the manifest says {entry.bytes:,} and {entry.checksum}: it was cut short or changed"
        )


def _whole(address: str, name: str) -> bytes:
    """Return the bytes of a small file."""
    with _opened(address, name) as (blocks, size):
        content = b"".join(blocks)
    if size and len(content) != size:
        raise _Differs(f"{len(content):,} of its {size:,} bytes arrived")
    return content


@contextmanager
def _opened(address: str, name: str) -> Iterator[tuple[Iterator[bytes], int]]:
    """Open a file in storage: its bytes, block by block, and how many they should be (0: unknown)."""
    (file,) = places.files(f"{address}/{name}", "data.dir")
    with file.open() as stream:
        yield iter(lambda: stream.read(_BLOCK), b""), file.size


def _tried(address: str, name: str, log: Callable[[str], None], call: Callable[[], Result]) -> Result:
    """Return what a call returns, after some more tries where storage fails it.

    Raises:
        DataError: of the last try; at once where storage has no such file, or cannot be asked from here.
    """
    for pause in _PAUSES:
        try:
            return call()
        except places.Hopeless:
            raise
        except (_Differs, DataError) as error:
            log(f"fetch: {name} did not arrive ({error}); trying again in {pause:g} s")
            time.sleep(pause)
    try:
        return call()
    except _Differs as error:
        raise DataError(
            f"{address}/{name}: {error}; run the same command again, and if the error persists, put the right file there"
        ) from None


def _make_room(folder: Path, needed: int, limit: int, log: Callable[[str], None]) -> None:
    """Take away copies that no process reads, the one that was opened last longest ago first, until this one fits in the bound.

    Raises:
        DataError: when it does not even so.
    """
    if needed > limit:
        raise DataError(
            f"{folder}: needs {needed / 1e9:.2f} GB, but data.cache_gb = {limit / 1e9:g}; every step reads from all of it, so raise that to "
            f"{needed / 1e9 + 0.01:.2f} or more"
        )
    sizes = {each: _bytes(each) for each in folder.parent.iterdir() if _is_copy(each) and each != folder}
    for other in sorted(sizes, key=_last_opened):
        if sum(sizes.values()) + needed <= limit:
            return
        # Who changes or reads it has one of the locks.
        with closing(_open_lock(other, "changed")) as changed, closing(_open_lock(other, "read")) as read:
            if try_lock(changed) and try_lock(read):
                log(f"fetch: removing {other}, {sizes.pop(other) / 1e6:,.1f} MB")
                (other / "manifest.json").unlink(missing_ok=True)
                shutil.rmtree(other)
    if (kept := sum(sizes.values())) + needed > limit:
        raise DataError(
            f"{folder.parent}: other processes read {kept / 1e9:.2f} GB of it, and {needed / 1e9:.2f} GB more are needed; "
            f"raise data.cache_gb = {limit / 1e9:g}, or name another folder with data.cache"
        )


def _is_copy(folder: Path) -> bool:
    """Return whether a folder of the cache is a copy: `data.cache` may name one that holds other things, too."""
    return bool(_COPY.fullmatch(folder.name)) and folder.is_dir() and _lock_path(folder, "changed").exists()


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _last_opened(folder: Path) -> float:
    path = _lock_path(folder, "read")
    return path.stat().st_mtime if path.exists() else 0.0


def _lock_path(folder: Path, what: str) -> Path:
    return folder.with_name(f"{folder.name}.{what}")


def _open_lock(folder: Path, what: str, to_read: bool = False) -> TextIO:
    return open(_lock_path(folder, what), "r" if to_read else "a", encoding="utf-8")


@contextmanager
def _lock(folder: Path, what: str) -> Iterator[None]:
    """Wait for a lock of a copy, and hold it within."""
    with _open_lock(folder, what) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
