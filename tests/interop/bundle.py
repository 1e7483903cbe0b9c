"""A writer of TensorFlow's checkpoints, as small as the format allows: what the reader is tested with."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit, from its definition (RFC 3720)."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def number(at: int, value: int) -> bytes:
    return varint(at << 3) + varint(value)


def message(at: int, content: bytes) -> bytes:
    return varint(at << 3 | 2) + varint(len(content)) + content


def block(items: list[tuple[bytes, bytes]], compression: int = 0) -> bytes:
    """A block with its trailer; every third key begins anew."""
    out, before, restarts = b"", b"", []
    for i, (key, value) in enumerate(items):
        shared = 0
        if i % 3 == 0:
            restarts.append(len(out))
        else:
            while shared < min(len(key), len(before)) and key[shared] == before[shared]:
                shared += 1
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    out += b"".join(struct.pack("<I", restart) for restart in restarts or [0]) + struct.pack("<I", len(restarts or [0]))
    out += bytes([compression])
    return out + struct.pack("<I", masked(out))


def handle(start: int, content: bytes) -> bytes:
    return varint(start) + varint(len(content) - 5)


def write_bundle(
    prefix: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, int] | None = None, per_block: int = 4, compression: int = 0
) -> None:
    """Write `PREFIX.index` and `PREFIX.data-00000-of-00001`; a tensor has the type number of `dtypes`, or that of float32."""
    data, items = b"", [(b"", number(1, 1) + message(3, number(1, 1)))]
    for name in sorted(tensors):
        raw = tensors[name].tobytes()
        shape = b"".join(message(2, number(1, size)) for size in tensors[name].shape)
        entry = number(1, (dtypes or {}).get(name, 1)) + message(2, shape) + number(4, len(data)) + number(5, len(raw))
        items.append((name.encode(), entry + varint(6 << 3 | 5) + struct.pack("<I", masked(raw))))
        data += raw
    out, index = b"", []
    for start in range(0, len(items), per_block):
        part = items[start : start + per_block]
        content = block(part, compression)
        index.append((part[-1][0], handle(len(out), content)))
        out += content
    statistics, top = block([]), block(index)
    footer = handle(len(out), statistics) + handle(len(out) + len(statistics), top)
    magic = struct.pack("<Q", 0xDB4775248B80FB57)
    prefix.with_name(f"{prefix.name}.index").write_bytes(out + statistics + top + footer.ljust(40, b"\0") + magic)
    prefix.with_name(f"{prefix.name}.data-00000-of-00001").write_bytes(data)
