"""Checkpoints of TensorFlow (the "tensor bundle" of its Saver), read without TensorFlow.

`NAME.index` is a sorted string table of LevelDB: blocks of entries that share the beginning of their keys, each block with a checksum. Its values are
protocol buffers, a `BundleHeaderProto` under the empty key and a `BundleEntryProto` for each tensor, which says where in
`NAME.data-00000-of-00001` its bytes lie and their checksum. Every checksum of what is read is compared.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overnight.errors import DataError
from overnight.interop.crc32c import masked_crc32c

_MAGIC = 0xDB4775248B80FB57
_FOOTER, _TRAILER = 48, 5
_LITTLE_ENDIAN = 0
# Of `DataType`: those of numbers that a network's weights may have, by number.
_TYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 14: np.dtype("<u2"), 19: np.dtype("<f2")}
_BFLOAT16 = 14


@dataclass
class _Entry:
    """Where a tensor lies: the fields of `BundleEntryProto`."""

    dtype: int = 0
    shape: list[int] = field(default_factory=list)
    shard: int = 0
    offset: int = 0
    size: int = 0
    checksum: int = 0
    sliced: bool = False


def read_bundle(prefix: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """Read tensors of a TensorFlow checkpoint.

    Args:
        prefix: the path without `.index`.
        wanted: says by its name whether a tensor is read; the others are not looked at.

    Returns:
        fp32 tensors by the names of TensorFlow.

    Raises:
        DataError: a file is missing, cut short or damaged, or a tensor is of a kind that no weight has.
    """
    index = prefix.with_name(f"{prefix.name}.index")
    try:
        table = dict(_table(_read(index)))
        shards, entries = _header(table.pop(b"", b"")), {key.decode(): _entry(value) for key, value in table.items()}
    except (ValueError, IndexError, struct.error) as error:
        raise DataError(f"{index}: is damaged or no index of a TensorFlow checkpoint ({error}); copy it again") from None
    found = {name: entry for name, entry in entries.items() if wanted(name)}
    files: dict[int, np.ndarray] = {}
    out = {}
    for name, entry in found.items():
        file = prefix.with_name(f"{prefix.name}.data-{entry.shard:05d}-of-{shards:05d}")
        if entry.shard not in files:
            files[entry.shard] = _mapped(file)
        out[name] = _tensor(name, entry, files[entry.shard], file)
    return out


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; a checkpoint of TensorFlow is a .index file and its .data files"
        ) from None


def _mapped(path: Path) -> np.ndarray:
    """Return the bytes of a file, which are read from the disk where they are looked at."""
    try:
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; it belongs to the .index file beside it") from None


def _tensor(name: str, entry: _Entry, data: np.ndarray, file: Path) -> Tensor:
    kind = _TYPES.get(entry.dtype)
    if entry.sliced or kind is None:
        what = "is split into parts" if entry.sliced else f"has the type number {entry.dtype} of TensorFlow"
        raise DataError(f"{file}: tensor {name} {what}; only whole tensors of floating-point numbers can be read")
    if entry.offset + entry.size > len(data):
        raise DataError(
            f"{file}: is cut short: it has {len(data):,} bytes, and tensor {name} ends at {entry.offset + entry.size:,}; copy it again"
        )
    if entry.size != math.prod(entry.shape) * kind.itemsize:
        raise DataError(f"{file}: tensor {name} of shape {tuple(entry.shape)} has {entry.size:,} bytes; the .index file is another's")
    raw = data[entry.offset : entry.offset + entry.size].tobytes()
    if masked_crc32c(raw) != entry.checksum:
        raise DataError(f"{file}: tensor {name} is damaged: its checksum differs from that in the .index file; copy it again")
    values = np.frombuffer(raw, kind)
    if entry.dtype == _BFLOAT16:  # the upper half of a float32
        values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return torch.from_numpy(values.astype(np.float32)).reshape(entry.shape)


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a sorted string table."""
    if len(data) < _FOOTER or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise ValueError("its last bytes are not those of such a table: it is cut short")
    footer = data[-_FOOTER:]
    _, at = _handle(footer, 0)  # of the table's own statistics
    (offset, size), _ = _handle(footer, at)
    for _, value in _block(data, offset, size):
        (offset, size), _ = _handle(value, 0)
        yield from _block(data, offset, size)


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = _varint(data, at)
    size, at = _varint(data, at)
    return (offset, size), at


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block; each key says how many bytes it shares with the one before."""
    whole = data[offset : offset + size + _TRAILER]
    if len(whole) < size + _TRAILER or size < 4:
        raise ValueError(f"a block at byte {offset} is cut short")
    if masked_crc32c(whole[: size + 1]) != struct.unpack("<I", whole[size + 1 :])[0]:
        raise ValueError(f"the checksum of the block at byte {offset} differs")
    if whole[size]:
        raise ValueError("its blocks are compressed, which TensorFlow's Saver does not do")
    (restarts,) = struct.unpack("<I", whole[size - 4 : size])
    end, at, key = size - 4 - 4 * restarts, 0, b""
    while at < end:
        shared, at = _varint(whole, at)
        own, at = _varint(whole, at)
        length, at = _varint(whole, at)
        if shared > len(key) or at + own + length > end:
            raise ValueError(f"an entry of the block at byte {offset} is longer than the block")
        key = key[:shared] + whole[at : at + own]
        yield key, whole[at + own : at + own + length]
        at += own + length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number is longer than 64 bits")


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protocol buffer."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        length = {1: 8, 5: 4}.get(wire, -1)
        if wire == 2:
            length, at = _varint(message, at)
        if length < 0 or at + length > len(message):
            raise ValueError(f"a field of wire type {wire} does not fit its message")
        raw, at = message[at : at + length], at + length
        yield number, raw if wire == 2 else int.from_bytes(raw, "little")


def _header(message: bytes) -> int:
    """Return the number of data files."""
    found = dict(_fields(message))
    shards, order = found.get(1, 0), found.get(2, _LITTLE_ENDIAN)
    if not isinstance(shards, int) or not 0 < shards < 100_000 or order != _LITTLE_ENDIAN:
        raise ValueError("its header names no data files" if order == _LITTLE_ENDIAN else "it is of a big-endian machine")
    return shards


def _entry(message: bytes) -> _Entry:
    entry = _Entry()
    numbers = {1: "dtype", 3: "shard", 4: "offset", 5: "size", 6: "checksum"}
    for number, value in _fields(message):
        if number in numbers and isinstance(value, int):
            setattr(entry, numbers[number], value)
        elif number == 2 and isinstance(value, bytes):
            sizes = [dict(_fields(each)).get(1, 0) for at, each in _fields(value) if at == 2 and isinstance(each, bytes)]
            entry.shape = [size for size in sizes if isinstance(size, int)]
        elif number == 7:
            entry.sliced = True
    return entry
