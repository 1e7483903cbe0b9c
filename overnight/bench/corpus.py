"""`overnight bench corpus`: raw text to shards, its time, memory and disk, beside examples that are written ahead by pure Python.

`overnight prepare` is run on an archive, with near-duplicates. Its speed and memory are measured again with several times the text. What reading, cleaning and so on
take alone is measured on a part, and what the loader takes to make masked batches out of the shards, because the peer's records have both. Rates are of megabytes
of raw text; those by processor time are of one core, whatever else it does, and include the training of the vocabulary, which takes some seconds for any text.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from overnight import config
from overnight.batches.loader import Samples
from overnight.bench.corpus_peer import LENGTH, PREDICTIONS, write_examples
from overnight.bench.corpus_text import pack, recombined, texts
from overnight.bench.measure import Row, Timing, printed, rate_row
from overnight.bench.processes import Cost, measured
from overnight.config import BertPhase
from overnight.corpus import shingles
from overnight.corpus.clean import clean
from overnight.corpus.decompress import unpacked
from overnight.corpus.near_duplicates import WORDS, bands_for
from overnight.corpus.sentences import sentences
from overnight.corpus.shards import load_manifest, open_shards, write_shard
from overnight.corpus.tokenizer import Encoder, count_words, load_tokenizer, load_tokens, load_vocabulary
from overnight.errors import ConfigError, UserError
from overnight.machine import usable_cores

_BOOKS = "$OVERNIGHT_DATA/books-classic.tar.xz"
_THRESHOLD = 0.8
# Bytes of the part on which stages are measured, and sentences given to the peer; sequences that the loader makes.
_PART, _SEQUENCES = 5_000_000, 8192
_PEER = "pure Python, by hand"
_LEAST_SIZE = 0.1
_ONE_CORE, _BATCHES = "prepare, one core", "masked batches, one core"
_PHASES = {"short": {"steps": 1, "global_batch_size": 256, "seq_len": LENGTH, "max_predictions_per_seq": PREDICTIONS}}


def run(
    peer: str = "by hand", tiny: bool = False, size: float = 0.0, text: str = "", times: Sequence[int] = (4,), workers: int = 0
) -> None:
    """Measure and print the rows, JSON last.

    Args:
        peer: `none` leaves it out.
        tiny: 1 MB, to see that it runs.
        size: megabytes of text, 0: all of the source.
        text: source, as in `data.paths`; empty: the books where they are, else the documentation inside the Python environment.
        times: of how many times the text speed and memory are measured again.
        workers: processes, 0: one for each core.

    Raises:
        ConfigError: for a size, a number of times or of workers that is none.
    """
    _check(size, times, workers)
    text = text or (_BOOKS if _there(_BOOKS) else "builtin:python-docs")
    size, workers = (1.0 if tiny else size), workers or usable_cores()

    def add(*more: Row) -> None:
        for row in more:
            rows.append(row)
            beside = "" if row.peer is None else f"  {row.peer}: {row.peer_value:.4g}, {row.ratio:.2f} times"
            print(f"{row.name}: {row.value:.4g} {row.unit}{beside}", flush=True)

    with printed("corpus") as rows, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            part = list(texts(text, min(size * 1e6 or _PART, _PART)))
        except UserError as error:  # it is an option here
            raise type(error)(str(error).replace("data.paths", "--text")) from None
        source = text
        # A glob, a folder, a server or a part of an archive is no file that could be unpacked alone.
        if size or not (text.endswith(".tar.xz") and config.environment_path(text, "data.paths").is_file()):
            source = str(folder / "text.tar.xz")
            pack(texts(text, size * 1e6), Path(source))
        # A hundredth of a few books is none.
        settings = {"valid_fraction": 0.0 if size else 0.01, "vocab_size": 1000 if tiny else 30522, "workers": workers}
        cost = prepared(source, folder / "data", settings)
        total = sum(each.bytes for each in load_manifest(folder / "data").sources)
        theirs = None if peer == "none" else _peer_rate(part, folder / "data")
        add(*_costs(total, cost, folder / "data", workers, theirs))
        once = rows[0].value
        add(*_stages(source, part, folder / "data", 1 if tiny else 3))
        add(_batches(folder / "data", total))
        if theirs is not None:
            rate = 1 / sum(1 / row.value for row in rows if row.name in (_ONE_CORE, _BATCHES))
            add(Row("raw text to masked examples, one core", rate, "MB/s", peer=_PEER, peer_value=theirs))
        for number in times:
            larger = folder / "larger.tar.xz"
            pack(recombined(text, number * total), larger)
            more = prepared(str(larger), folder / "larger", settings)
            size = sum(each.bytes for each in load_manifest(folder / "larger").sources)
            add(Row(f"prepare, {number} times the text", size / 1e6 / more.seconds, "MB/s", peer="once", peer_value=once))
            add(Row(f"memory, {number} times the text", more.peak_memory / 1e6, "MB", peer="once", peer_value=cost.peak_memory / 1e6))
            shutil.rmtree(folder / "larger")


def _check(size: float, times: Sequence[int], workers: int) -> None:
    if not (size == 0 or _LEAST_SIZE <= size < math.inf):
        raise ConfigError(f"--size = {size:g}: must be megabytes of text, {_LEAST_SIZE} or more, or 0 for all of it")
    if workers < 0:
        raise ConfigError(f"--workers = {workers}: must be 0 or more")
    if min(times, default=1) < 1:
        raise ConfigError(f"--times = {min(times)}: must be 1 or more")


def _there(path: str) -> bool:
    return "OVERNIGHT_DATA" in os.environ and Path(os.path.expandvars(path)).exists()


def prepared(source: str, folder: Path, settings: Mapping[str, Any]) -> Cost:
    """Return what `overnight prepare` costs, whose lines are printed.

    Args:
        source: as in `data.paths`.
        folder: of the shards.
        settings: of `data`.
    """
    data = {"paths": [source], "dir": str(folder), "near_duplicates": _THRESHOLD, **settings}
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(json.dumps({"name": "corpus", "data": data, "phases": _PHASES}), encoding="utf-8")
    return measured([sys.executable, "-m", "overnight", "prepare", str(recipe)], folder, lambda line: print(f"  {line}", flush=True))


def _costs(total: int, cost: Cost, folder: Path, workers: int, theirs: float | None) -> list[Row]:
    manifest = load_manifest(folder)
    tokens, size = (sum(getattr(shard, what) for shard in manifest.shards) for what in ("tokens", "bytes"))
    return [
        Row(f"prepare, {total / 1e6:.0f} MB, {workers} worker{'s' * (workers > 1)}", total / 1e6 / cost.seconds, "MB/s"),
        Row(_ONE_CORE, total / 1e6 / cost.cpu_seconds, "MB/s", peer=None if theirs is None else _PEER, peer_value=theirs),
        Row("memory of all processes", cost.peak_memory / 1e6, "MB"),
        Row("disk while preparing", cost.peak_disk / 1e6, "MB"),
        Row("disk that training reads, a token", size / tokens, "bytes"),
    ]


def _stages(source: str, part: list[str], folder: Path, repeats: int) -> list[Row]:
    """Return the rates of the stages alone, of processor time; each is given what the one before makes."""
    size = sum(len(text.encode()) for text in part) / 1e6
    cleaned = [clean(text) for text in part]
    lines = ["\n".join(sentences(text)) for text in cleaned]
    flat = np.frombuffer("".join(lines).encode(), np.uint8)
    offsets = np.cumsum([0, *(len(text.encode()) for text in lines)])
    encoder = Encoder(load_tokenizer(folder))
    arrays = encoder.encode(lines)
    stages: dict[str, Callable[[], object]] = {
        "clean": lambda: [clean(text) for text in part],
        "split into sentences": lambda: [sentences(text) for text in cleaned],
        "sign for near-duplicates": lambda: shingles.sketches(
            *shingles.ngram_hashes(flat, offsets, WORDS, whole_short=True), *bands_for(_THRESHOLD)
        ),
        "count words": lambda: count_words(lines, True),
        "tokenize, all words new": lambda: Encoder(load_tokenizer(folder)).encode(lines),
        "tokenize, all words known": lambda: encoder.encode(lines),
        "write shards": lambda: write_shard(folder / "bench.arrow", *arrays),
    }
    unpacked_bytes = [0]

    def unpack() -> None:
        with open(config.environment_path(source, "data.paths"), "rb") as file:
            stream, _ = unpacked(file, source)
            unpacked_bytes[0] = sum(len(stream.read(1 << 20)) for _ in range(math.ceil(size)))

    rows = [rate_row("unpack", "MB/s", 1.0, Timing(tuple(_cpu_seconds(unpack) / (unpacked_bytes[0] / 1e6) for _ in range(repeats))))]
    for name, stage in stages.items():
        rows.append(rate_row(name, "MB/s", size, Timing(tuple(_cpu_seconds(stage) for _ in range(repeats)))))
    (folder / "bench.arrow").unlink()
    return rows


def _cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def _batches(folder: Path, total: int) -> Row:
    """Return the rate at which an epoch of masked batches would be made of the shards, as megabytes of the text that they are from."""
    phase = cast(BertPhase, config.build_run({"name": "corpus", "phases": _PHASES}).phases["short"])
    samples = Samples(open_shards(folder, "train", verify=False), load_vocabulary(folder), phase, (0,))
    planning = _cpu_seconds(lambda: samples.sizes(0))
    size, batch = samples.epoch_size(), phase.global_batch_size
    steps = max(1, min(_SEQUENCES, size) // batch)
    making = _cpu_seconds(lambda: [samples.step(step) for step in range(steps)])
    manifest = load_manifest(folder)
    trained = total / 1e6 * manifest.count("train", "tokens") / sum(shard.tokens for shard in manifest.shards)
    return Row(_BATCHES, trained / (planning + making / (steps * batch) * size), "MB/s")


def _peer_rate(part: list[str], folder: Path) -> float:
    """Return megabytes of raw text a second of the peer, which is given clean sentences and a vocabulary."""
    split = [sentences(clean(text)) for text in part]
    if len(split) == 1:  # B is from another document
        split = [split[0][::2], split[0][1::2]]
    tokens, _ = load_tokens(folder)
    seconds = _cpu_seconds(lambda: write_examples(split, tokens, folder / "peer.records"))
    (folder / "peer.records").unlink()
    return sum(len(text.encode()) for text in part) / 1e6 / seconds
