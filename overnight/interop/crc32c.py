"""CRC-32C (Castagnoli), the checksum of TensorFlow's checkpoints, at the speed of numpy.

A CRC is linear: bytes are read in many columns at once, each from a zero register, and the registers are joined two by two, the left one
moved past the bytes of the right one.
Shapes: K columns, W words of 8 bytes in a column.
"""

from __future__ import annotations

from functools import cache

import numpy as np

_POLYNOMIAL = 0x82F63B78
_COLUMNS, _WORDS = 4096, 128
_BLOCK = _COLUMNS * _WORDS * 8
# Up to so many bytes one after another are quicker than a block.
_FEW = 1 << 16
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of some bytes (RFC 3720, B.4)."""
    view = np.frombuffer(data, np.uint8)
    head = len(view) % _BLOCK
    register = _bytewise(view[:head], 0xFFFFFFFF) if head < _FEW else _block(_in_front(view[:head]))
    for start in range(head, len(view), _BLOCK):
        block = view[start : start + _BLOCK].copy()
        # What the register holds counts as if it stood on the first four bytes.
        block[:4] ^= np.frombuffer(np.uint32(register).astype("<u4").tobytes(), np.uint8)
        register = _block(block)
    return register ^ 0xFFFFFFFF


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C as LevelDB and TensorFlow store it, so that the checksum of text with checksums in it stays a good one."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


@cache
def _tables() -> np.ndarray:
    """Return uint32 [8, 256]: the register after byte b and then 0 to 7 zero bytes."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = np.where(first & 1, (first >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), first >> np.uint32(1)).astype(np.uint32)
    tables = [first]
    for _ in range(7):
        tables.append(first[tables[-1] & 255] ^ (tables[-1] >> np.uint32(8)))
    return np.stack(tables)


def _bytewise(data: np.ndarray, register: int) -> int:
    table = _tables()[0]
    for byte in data.tolist():
        register = int(table[(register ^ byte) & 255]) ^ (register >> 8)
    return register


def _in_front(data: np.ndarray) -> np.ndarray:
    """Return a whole block that ends with some bytes, four or more; zeros in front of them leave a zero register as it is."""
    block = np.zeros(_BLOCK, np.uint8)
    block[_BLOCK - len(data) :] = data
    block[_BLOCK - len(data) : _BLOCK - len(data) + 4] ^= 255
    return block


def _block(block: np.ndarray) -> int:
    """Return the register behind one block, from a zero register."""
    tables = _tables()
    words_WK2 = np.ascontiguousarray(block.view("<u4").reshape(_COLUMNS, _WORDS, 2).transpose(1, 2, 0))
    registers_K = np.zeros(_COLUMNS, np.uint32)
    for low_K, high_K in words_WK2:
        low_K = low_K ^ registers_K
        registers_K = np.zeros(_COLUMNS, np.uint32)
        for number in range(4):
            shift = np.uint32(8 * number)
            registers_K ^= tables[7 - number][(low_K >> shift) & 255] ^ tables[3 - number][(high_K >> shift) & 255]
    for table in _joins():
        left, right = registers_K[0::2], registers_K[1::2]
        registers_K = right.copy()
        for number in range(4):
            registers_K ^= table[number][(left >> np.uint32(8 * number)) & 255]
    return int(registers_K[0])


@cache
def _joins() -> list[np.ndarray]:
    """Return for each time that columns are joined uint32 [4, 256]: what each byte of a register becomes behind a column's length of zeros."""
    table, length = _tables()[:4][::-1].copy(), 4
    found = []
    while length < _BLOCK:
        if length >= _WORDS * 8:
            found.append(table)
        moved = np.zeros_like(table)
        for number in range(4):
            moved ^= table[number][(table >> np.uint32(8 * number)) & 255]
        table, length = moved, 2 * length
    return found
