"""Many clients of `overnight serve` at once: errors, throughput and latency, beside one client and beside the model without HTTP.

    python -m benchmarks.serve_load                          a classifier of random weights, 50 clients, about 2 minutes on two cores
    python -m benchmarks.serve_load --from RUN/finetune/TASK --clients 200 --think 5 --threads 2

The server is a process of its own on loopback, and so are the clients, all of them in one, by connections that stay open. Each asks for one sentence at a
time, back to back, or with pauses between its requests (exponential, so that requests come as of people who do not know of each other). Every answer is
compared with that of the model in this process: another status or another answer is an error. With pauses the model alone is also called after pauses as long as
those between any two requests: its weights have left the caches then, for the server as for it.

Of clients back to back the latency has a bound that no server can beat: N requests are always under way, so on average each takes N divided by the requests
a second, at most those of the model alone in batches of N. It is reported as `bound`. Into benchmarks/results/<date>-<machine>-serve-load/ goes result.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil

import overnight
from overnight.bench.infer import NETWORKS, percentile
from overnight.bench.infer_texts import natural_texts, write_classifier
from overnight.bench.measure import Row, result
from overnight.inference.model import Model

_TOLERANCE = 1e-3
"""Between the probabilities of an answer and of the same text alone: batches are summed in another order."""


@dataclass
class Load:
    """What clients met with."""

    seconds: list[float] = field(default_factory=list)
    """From a request's first byte to the last of its answer, for those that were answered rightly."""
    errors: list[str] = field(default_factory=list)
    elapsed: float = 0.0
    server: float = 0.0
    """Seconds of the server's processor time."""

    def rows(self, name: str, peer: str, beside: Sequence[float]) -> list[Row]:
        """Return its numbers, the latency beside other latencies; without one where no answer was right."""
        done = len(self.seconds)
        rows = [
            Row(f"{name}, errors", float(len(self.errors)), "error"),
            Row(f"{name}, throughput", done / self.elapsed, "requests/s"),
            Row(f"{name}, processor time of the server", 1e3 * self.server / max(1, done), "ms"),
        ]
        for what, share in (("median", 0.5), ("p95", 0.95)) if done else ():
            values = [1e3 * percentile(seconds, share) for seconds in (self.seconds, beside)]
            rows.append(Row(f"{name}, {what}", values[0], "ms", None, peer, values[1]))
        return rows


@contextmanager
def served(source: str, words: Sequence[str]) -> Iterator[tuple[int, psutil.Process]]:
    """Serve a model, yield its port and process, and end it well."""
    command = [sys.executable, "-m", "overnight", "serve", "--from", source, "--port=0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r"serving on http://127\.0\.0\.1:(\d+) ", line) for line in process.stdout)), None)
            if found is None:
                raise SystemExit("the server ended before it served")
            yield int(found[1]), psutil.Process(process.pid)
        finally:
            process.terminate()


def alone(model: Model, texts: Sequence[str], together: int, pause: float = 0.0) -> tuple[list[float], list[Any]]:
    """Return the seconds of the model's calls with so many texts each, and all answers.

    Args:
        pause: mean time before a call (s), in which the caches forget the weights.
    """
    seconds: list[float] = []
    answers: list[Any] = []
    drawn = random.Random(0)
    for first in range(0, len(texts), together):
        time.sleep(drawn.expovariate(1 / pause) if pause else 0.0)
        start = time.perf_counter()
        answers += model.predict(list(texts[first : first + together]))
        seconds.append(time.perf_counter() - start)
    return seconds, answers


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: str) -> tuple[int, Any]:
    """Ask for one text, and return the status and the answer."""
    body = json.dumps({"texts": [text]}).encode()
    writer.write(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    content = await reader.readexactly(int(found[1])) if found else b"{}"
    return int(head.split(None, 2)[1]), json.loads(content)


def is_same(answer: Any, expected: Any) -> bool:
    """Return whether two answers of a task of texts say the same."""
    keys = ("probabilities", "score")
    one, other = (next((found[key] for key in keys if key in found), None) for found in (answer, expected))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(abs(one[name] - other[name]) <= _TOLERANCE for name in one)
    if isinstance(one, float | int) and isinstance(other, float | int):
        return abs(one - other) <= _TOLERANCE * max(1.0, abs(other))
    return bool(answer == expected)


async def client(port: int, asked: Sequence[tuple[str, Any]], pauses: Sequence[float], load: Load) -> None:
    """Ask for texts one after another, a pause before each, and compare the answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for (text, expected), pause in zip(asked, pauses, strict=True):
            await asyncio.sleep(pause)
            start = time.perf_counter()
            status, found = await ask(reader, writer, text)
            took = time.perf_counter() - start
            if status == 200 and len(found["answers"]) == 1 and is_same(found["answers"][0], expected):
                load.seconds.append(took)
            else:
                load.errors.append(f"{status}: {found}")
    except (OSError, EOFError, ValueError) as error:
        load.errors.append(repr(error))
    finally:
        writer.close()


def under(port: int, process: psutil.Process, asked: Sequence[tuple[str, Any]], clients: int, requests: int, think: float) -> Load:
    """Have clients ask at once, each so many requests.

    Args:
        asked: texts with their answers, of which they take turns.
        think: mean pause before a request (s).
    """
    load, drawn = Load(), random.Random(0)
    shares = [[asked[(number * requests + i) % len(asked)] for i in range(requests)] for number in range(clients)]
    # A client's first pause is drawn too, so that they do not all begin together.
    pauses = [[drawn.expovariate(1 / think) if think else 0.0 for _ in range(requests)] for _ in range(clients)]

    async def all_of_them() -> None:
        await asyncio.gather(*(client(port, share, pause, load) for share, pause in zip(shares, pauses, strict=True)))

    def used() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    start, before = time.perf_counter(), used()
    asyncio.run(all_of_them())
    load.elapsed, load.server = time.perf_counter() - start, used() - before
    return load


def measure(source: str, clients: int, requests: int, think: float, words: Sequence[str], model: Model) -> list[Row]:
    """Return the rows of every load.

    Args:
        source: what is served.
        clients: at once.
        requests: of each client.
        think: mean pause of a client between two requests (s).
        words: settings of the server.
        model: the same as is served, in this process.
    """
    texts = natural_texts()[: max(64, min(clients * requests, 1024))]
    alone(model, texts[:16], 1)
    single, answers = alone(model, texts, 1)
    batches, _ = alone(model, texts, clients)
    per_text = sum(batches) / len(texts)
    rows = [
        *(Row(f"model alone, batch 1, {what}", 1e3 * percentile(single, share), "ms") for what, share in (("median", 0.5), ("p95", 0.95))),
        Row(f"model alone, batches of {clients}", 1 / per_text, "requests/s"),
    ]
    if think:
        paused, _ = alone(model, texts[:200], 1, think / clients)
        name = f"model alone, batch 1, a pause of {1e3 * think / clients:g} ms"
        rows += [Row(f"{name}, {what}", 1e3 * percentile(paused, share), "ms") for what, share in (("median", 0.5), ("p95", 0.95))]
    asked = list(zip(texts, answers, strict=True))
    with served(source, words) as (port, process):
        under(port, process, asked, clients, 4, 0.0)  # kernels are made, and does not count
        one = under(port, process, asked, 1, min(200, clients * requests), 0.0)
        rows += one.rows("1 client back to back", "model alone, batch 1", single)
        thinking = under(port, process, asked, clients, requests, think)
        rows += thinking.rows(f"{clients} clients, a pause of {think:g} s", "model alone, batch 1", single)
        busy = under(port, process, asked, clients, requests, 0.0)
        rows += busy.rows(f"{clients} clients back to back", "model alone, batch 1", single)
    rows.append(Row(f"{clients} clients back to back, bound of the mean", 1e3 * clients * per_text, "ms"))
    for error in [*one.errors, *thinking.errors, *busy.errors][:5]:
        print(f"error: {error}", file=sys.stderr)
    return rows


def main() -> int:
    """Measure, print the rows, write the result; returns 1 where a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--from", dest="source", metavar="SOURCE", help="what is served; default a bert-mini of random weights with three classes"
    )
    parser.add_argument("--model", default="bert-mini", choices=[*NETWORKS], help="instead of bert-mini, without --from")
    parser.add_argument("--clients", type=int, default=50, help="at once (default 50)")
    parser.add_argument("--requests", type=int, default=20, help="of each client (default 20)")
    parser.add_argument(
        "--think", type=float, default=1.0, metavar="SECONDS", help="mean pause of a client between two requests (default 1)"
    )
    parser.add_argument("--precision", default="fp32", help="of server and model (default fp32)")
    parser.add_argument("--threads", type=int, default=1, help="of server and model (default 1)")
    parser.add_argument("--machine", default=f"cpu{os.cpu_count()}", help="word for the machine in the name of the results folder")
    parser.add_argument("--to", type=Path, default=Path(__file__).parent / "results", metavar="DIR", help="where that folder goes")
    options = parser.parse_args()
    words = [f"--precision={options.precision}", f"--compute.threads={options.threads}", "--compute.device=cpu"]
    with tempfile.TemporaryDirectory(prefix="overnight-serve-") as folder:
        source = options.source or str(Path(folder) / options.model)
        if not options.source:
            write_classifier(Path(source), NETWORKS[options.model], natural_texts(), onnx=False)
        model = overnight.load(source, precision=options.precision, device="cpu", threads=options.threads)
        rows = measure(source, options.clients, options.requests, options.think, words, model)
    for row in rows:
        beside = (
            ""
            if row.ratio is None or row.peer_value is None
            else f"   {row.value / row.peer_value:6.2f} times that of the {row.peer} ({row.peer_value:.3g})"
        )
        print(f"{row.name:56} {row.value:10.4g} {row.unit}{beside}")
    out = options.to / f"{date.today()}-{options.machine}-serve-load"
    out.mkdir(parents=True, exist_ok=True)
    found = {"command": ["python", "-m", "benchmarks.serve_load", *sys.argv[1:]], **result("serve-load", rows)}
    (out / "result.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(row.unit == "error" and row.value for row in rows))


if __name__ == "__main__":
    sys.exit(main())
