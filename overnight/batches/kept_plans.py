"""The plans of epochs, kept in the run folder so that a resumed run need not make them again."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import xxhash

from overnight.corpus.shards import Shard
from overnight.run_dir.atomic import write_whole
from overnight.state_files import digest


def keep_array(path: Path, array: np.ndarray) -> None:
    """Write an array of int32, and its checksum behind it."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    write_whole(path, [buffer.getbuffer(), digest(buffer.getbuffer()).encode()])


def kept_array(path: Path) -> np.ndarray | None:
    """Return the numbers of a kept array, memory-mapped; None where it is not there, or not as it was written: it only saves time."""
    try:
        content = np.memmap(path, np.uint8, "r")
        if digest(content[:-16].data) != bytes(content[-16:]).decode("latin-1"):
            return None
        # Not by np.load: it parses the header as Python, which some threads at once cannot do in CPython 3.11 (SystemError). Its length is all that is not known.
        header = 10 + int.from_bytes(content[8:10].tobytes(), "little")
        return np.asarray(content[header:-16]).view(np.int32)
    except (OSError, EOFError, ValueError):
        return None


def boundaries(shard: Shard) -> str:
    """Return a hash of all that a plan can depend on in a shard: where its sentences and documents begin."""
    state = xxhash.xxh3_128(np.ascontiguousarray(shard.sentence_starts).data)
    state.update(np.ascontiguousarray(shard.document_sentences).data)
    return str(state.hexdigest())
