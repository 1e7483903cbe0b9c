"""Clients of the load test count what a server does wrong, and the whole of it runs at its smallest size."""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("uvicorn")

from benchmarks import serve_load
from benchmarks.serve_load import is_same, under


@contextmanager
def a_server() -> Iterator[int]:
    """A server that answers `good` and nothing else rightly; its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            (text,) = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["texts"]
            if text == "gone":
                self.close_connection = True
                return
            body = json.dumps({"answers": [{"label": "a", "probabilities": {"a": 0.8, "b": 0.2 if text == "good" else 0.3}}]}).encode()
            self.send_response(503 if text == "busy" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    server: socketserver.BaseServer
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_wrong_answers_refusals_and_lost_connections_are_errors() -> None:
    expected = {"label": "a", "probabilities": {"a": 0.8, "b": 0.2}}
    process = psutil.Process(os.getpid())
    with a_server() as port:
        for text, wrong in (("good", 0), ("bad", 4), ("busy", 4), ("gone", 2)):
            load = under(port, process, [(text, expected)], 2, 2, 0.001)
            # A client whose connection is lost asks no more.
            assert (len(load.seconds), len(load.errors)) == (0 if wrong else 4, wrong)
            assert load.elapsed > 0 and all(0 < seconds <= load.elapsed for seconds in load.seconds)
    row, *_ = serve_load.Load([0.1], ["503"], 1.0).rows("x", "alone", [0.1])
    assert (row.name, row.value) == ("x, errors", 1.0)


def test_a_load_without_a_right_answer_has_errors_and_no_latency() -> None:
    rows = {row.name: row.value for row in serve_load.Load([], ["503", "503"], 1.0).rows("x", "alone", [0.1])}
    assert rows == {"x, errors": 2.0, "x, throughput": 0.0, "x, processor time of the server": 0.0}


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ({"probabilities": {"a": 0.5}}, {"probabilities": {"a": 0.5004}}, True),
        ({"probabilities": {"a": 0.5}}, {"probabilities": {"a": 0.502}}, False),
        ({"probabilities": {"a": 0.5}}, {"probabilities": {"b": 0.5}}, False),
        ({"score": 2.0}, {"score": 2.001}, True),
        ({"score": 2.0}, {"score": 2.1}, False),
        ({"error": "x"}, {"error": "x"}, True),
        ({"error": "x"}, {"probabilities": {"a": 0.5}}, False),
    ],
)
def test_answers_are_the_same_to_the_rounding_of_batches(answer: Any, expected: Any, same: bool) -> None:
    assert is_same(answer, expected) is same


@pytest.mark.heavy
def test_the_load_test_runs_and_says_what_it_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = ["--model=bert-tiny", "--clients=3", "--requests=2", "--think=0.01", "--machine=here", f"--to={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["serve_load", *words])
    assert serve_load.main() == 0
    ((out,),) = ([path for path in tmp_path.iterdir()],)
    found = json.loads((out / "result.json").read_text())
    assert out.name.endswith("-here-serve-load") and found["environment"]["python"] and found["command"][3:] == words
    rows = {row["name"]: row for row in found["rows"]}
    for load in ("1 client back to back", "3 clients, a pause of 0.01 s", "3 clients back to back"):
        assert rows[f"{load}, errors"]["value"] == 0 and rows[f"{load}, throughput"]["value"] > 0
        assert 0 < rows[f"{load}, median"]["value"] <= rows[f"{load}, p95"]["value"] and rows[f"{load}, p95"]["peer_value"] > 0
    assert rows["3 clients back to back, bound of the mean"]["value"] > 0 and "times that of the model alone" in capsys.readouterr().out
