"""`overnight bench infer`: a classifier at work on a CPU, text in and probabilities out, beside transformers' pipeline and onnxruntime in the same process.

All have the same weights, tokenizer and threads, and are given the same texts, so many at a time; before anything is timed their logits are compared.
Ours reads the texts without padding, the others pad each batch to its longest. With one thread the clock is the processor's time, which other work on the
machine does not lengthen; with several it is the wall's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from overnight.bench.infer_peers import Candidate, onnxruntime, ours, pipeline
from overnight.bench.infer_texts import natural_texts, texts_of_length, write_classifier
from overnight.bench.measure import Row, Timing, printed, rate_row
from overnight.bench.sizes import MODELS, MODERN_MODELS, not_emulated
from overnight.config import EncoderConfig
from overnight.errors import DataError
from overnight.models.int8 import is_exact

NETWORKS: dict[str, EncoderConfig] = {**MODELS, **MODERN_MODELS}
Answer = Callable[[list[str]], object]

PRECISIONS = ("fp32", "bf16", "int8")
TOLERANCE = 1e-4
"""Between the fp32 logits of ours and of a peer."""
_PAUSE = 0.5
"""Seconds for the threads of one program to fall asleep."""


@dataclass(frozen=True)
class Case:
    """Calls with equally many texts each."""

    length: int
    """Tokens of a text; 0 is sentences as they come."""
    batch: int
    calls: int
    rounds: int = 3

    @property
    def name(self) -> str:
        """Of its rows, behind the model."""
        return f"{self.length or 'natural'} {self.batch}"


# The last one gives each candidate all texts in one call, to batch as it likes.
CASES = [
    *(Case(0, batch, calls) for batch, calls in ((1, 48), (8, 16), (32, 8), (512, 1))),
    *(Case(128, batch, calls) for batch, calls in ((1, 24), (8, 6), (32, 2))),
    *(Case(512, batch, calls) for batch, calls in ((1, 8), (8, 2), (32, 1))),
]
TINY = [Case(0, 1, 4, 1), Case(0, 8, 2, 1), Case(16, 8, 2, 1)]


def run(peer: str = "transformers", tiny: bool = False) -> None:
    """Measure every case and print the rows, JSON last.

    Args:
        peer: `transformers`, with onnxruntime where it is installed, or `none`.
        tiny: the smallest sizes.

    Raises:
        DataError: a peer computes something else.
    """
    found = natural_texts()
    networks = ("bert-tiny",) if tiny else ("bert-mini", "modernbert-mini")
    precisions = PRECISIONS if tiny else not_emulated(PRECISIONS, str)
    with printed("infer") as rows, tempfile.TemporaryDirectory(prefix="overnight-infer-") as folder:
        for name in networks:
            write_classifier(Path(folder) / name, NETWORKS[name], found, onnx=peer != "none" and not tiny)
            for row in measure_model(name, Path(folder) / name, found, TINY if tiny else CASES, peer, precisions):
                rows.append(row)
                print(_describe(row), flush=True)


def measure_model(
    name: str, folder: Path, natural: Sequence[str], cases: Sequence[Case], peer: str, precisions: Sequence[str]
) -> Iterator[Row]:
    """Yield the rows of one model as they are measured: how ours agrees with each peer, and of every case texts a second and the time of a call."""
    candidates = {"overnight": ours(folder, "fp32")}
    for precision in precisions:
        if precision != "fp32" and (precision != "int8" or is_exact()):
            candidates[f"overnight {precision}"] = ours(folder, precision)
    if peer != "none":
        candidates |= {found.name: found for found in (pipeline(folder), onnxruntime(folder)) if found is not None}
    yield from compared(name, candidates, natural[:64])
    for case in cases:
        texts = texts_of_length(natural, case.length, case.batch * case.calls) if case.length else natural[: case.batch * case.calls]
        parts = [list(texts[at : at + case.batch]) for at in range(0, len(texts), case.batch)]
        seconds = take_turns({n: c.answer for n, c in candidates.items()}, parts, case.rounds)
        yield from case_rows(f"{name} {case.name}", len(texts), seconds)


def compared(name: str, candidates: Mapping[str, Candidate], texts: Sequence[str]) -> list[Row]:
    """Return the largest difference of each candidate's logits from ours in fp32.

    Raises:
        DataError: a peer's is more than 1e-4.
    """
    expected, rows = candidates["overnight"].logits(list(texts)), []
    for other, candidate in candidates.items():
        if other == "overnight":
            continue
        apart = float(np.abs(candidate.logits(list(texts)) - expected).max())
        if not other.startswith("overnight") and not apart <= TOLERANCE:
            raise DataError(f"{name}: {other} differs from overnight ({apart:.1e} apart, {TOLERANCE:.0e} allowed)")
        rows.append(Row(f"{name} logits of {other}", apart, "error"))
    return rows


def take_turns(functions: Mapping[str, Answer], parts: Sequence[list[str]], rounds: int) -> dict[str, list[list[float]]]:
    """Return the seconds of every call by candidate, round and part, behind one round that does not count.

    The candidates take turns at each part. With several threads they take turns at all parts, after a pause: onnxruntime's threads wait for more work by
    spinning, and took a core from whoever came next.
    """
    alone = torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    seconds: dict[str, list[list[float]]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for times in seconds.values():
            times.append([])
        groups = [[part] for part in parts] if alone else [parts]
        for group in groups:
            for name, function in functions.items():
                if not alone:
                    time.sleep(_PAUSE)
                for part in group:
                    start = clock()
                    function(part)
                    seconds[name][number].append(clock() - start)
    return {name: times[1:] for name, times in seconds.items()}


def case_rows(name: str, texts: int, seconds: Mapping[str, list[list[float]]]) -> list[Row]:
    """Return of ours beside every other candidate the texts a second, and the median and 95th percentile of the time of a call."""
    rows, own = [], seconds["overnight"]
    for other, theirs in seconds.items():
        if other == "overnight":
            continue
        precision = other.removeprefix("overnight ")
        ahead, peer = (f"{name} {precision}", "overnight fp32") if precision != other else (name, other)
        first, second = (theirs, own) if ahead != name else (own, theirs)
        beside = f"{ahead}, {peer}" if peer != "overnight fp32" else ahead
        totals = [Timing(tuple(map(sum, times))) for times in (first, second)]
        rows.append(rate_row(beside, "sequences/s", texts, totals[0], peer, totals[1]))
        for what, share in (("median", 0.5), ("p95", 0.95)):
            values = [1e3 * percentile([s for row in times for s in row], share) for times in (first, second)]
            rows.append(Row(f"{beside}, {what}", values[0], "ms", None, peer, values[1]))
    if len(seconds) == 1:
        rows.append(rate_row(name, "sequences/s", texts, Timing(tuple(map(sum, own)))))
    return rows


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of them lies, between two of them in proportion."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def _describe(row: Row) -> str:
    text = f"{row.name:52} {row.value:10.4g} {row.unit}"
    return text if row.ratio is None else f"{text}  {row.peer} {row.peer_value:.4g}  ratio {row.ratio:.2f}"
