"""A server of `overnight serve` in a process of its own, and ways to ask it."""

from __future__ import annotations

import json
import re
import socket
from http.client import HTTPConnection
from typing import Any

from overnight.config import BertRun
from tests.processes import Process
from tests.processes import overnight as command


def start(run: BertRun, *words: str, task: str = "") -> tuple[Process, int]:
    """A server of a run, and its port."""
    source = run.run_dir / "finetune" / task if task else run.run_dir
    process = command("serve", "--from", source, "--port=0", *words)
    for line in process.stdout:
        if found := re.fullmatch(r"serving on http://127\.0\.0\.1:(\d+) .*\n", line):
            return process, int(found[1])
    raise AssertionError("it ended before it served")


def ask(port: int, path: str, body: Any = None, method: str = "", **headers: str) -> tuple[int, Any]:
    """The status and the answer of a request; a body that is no bytes is sent as JSON."""
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, content, headers)
        response = connection.getresponse()
        text = response.read().decode()
        is_json = response.headers.get("content-type") == "application/json"
        return response.status, json.loads(text) if is_json else text
    finally:
        connection.close()


def sent(port: int, content: bytes) -> bytes:
    """What comes back for some bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(content)
        return rest(connection)


def rest(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(4096):
        found += part
    return found


HEAD = b"POST /embed HTTP/1.1\r\nHost: localhost\r\n"
