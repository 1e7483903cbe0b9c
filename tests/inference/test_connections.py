"""Connections of a server: how much and how long a client may send, where it listens, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.cli.main import main
from overnight.config import BertRun
from overnight.inference import connections
from overnight.inference.connections import Server, connection, listen
from tests.inference.serving import HEAD, ask, rest, sent, start
from tests.processes import HANG

Captured = pytest.CaptureFixture[str]


def test_a_body_without_a_length_is_measured(port: int) -> None:
    chunks = b"".join(b"400\r\n" + b"a" * 1024 + b"\r\n" for _ in range(3))
    assert sent(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks).startswith(b"HTTP/1.1 413 ")
    assert ask(port, "/health")[0] == 200


@pytest.mark.parametrize("stated", [True, False])
def test_who_sends_far_too_much_reads_why_it_is_refused(stated: bool, port: int) -> None:
    """A client that is cut off while it sends, as one that reads an answer only then, would see a broken connection instead."""
    size, part = 32 << 20, b"a" * (1 << 16)
    length = f"Content-Length: {size}\r\n\r\n" if stated else "Transfer-Encoding: chunked\r\n\r\n"
    whole = part if stated else b"10000\r\n" + part + b"\r\n"
    body = whole * (size // len(part)) + (b"" if stated else b"0\r\n\r\n")
    found = sent(port, HEAD + length.encode() + body)
    assert found.startswith(b"HTTP/1.1 413 ") and b"more than 2,000 bytes" in found


def test_who_asks_before_it_sends_is_refused_at_once(port: int) -> None:
    assert sent(port, HEAD + b"Expect: 100-continue\r\nContent-Length: 9999\r\n\r\n").startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_gives_up_who_is_too_slow_and_ends_well_even_with_a_connection_open(number: int, trained_run: BertRun) -> None:
    process, port = start(trained_run, "--timeout=0.5")
    with process, socket.create_connection(("127.0.0.1", port)):
        status, answer = ask(port, "/predict", {"texts": ["a"]})
        assert status == 400 and "finetune/classes instead" in answer["error"]
        # A body that never ends is given up.
        assert sent(port, HEAD + b'Content-Length: 100\r\n\r\n{"texts"').startswith(b"HTTP/1.1 408 ")
        # So are headers that never end, also of a second request, and a connection without any.
        assert b"the headers did not arrive within 0.5 seconds" in sent(port, HEAD)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as again:
            again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert again.recv(4096).startswith(b"HTTP/1.1 200 ")
            again.sendall(HEAD)
            assert b"the headers did not arrive within 0.5 seconds" in rest(again)
        assert sent(port, b"") == b""
        assert len(ask(port, "/embed", {"texts": ["", "b"]})[1]["embeddings"]) == 2
        process.send_signal(number)
        code, output = process.end()
    assert code == 0 and output == "stopped\n"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", ["GET /health", "POST /predict", "POST /embed"])
def test_who_sends_no_more_once_it_has_asked_reads_the_answer(path: str, version: str, port: int) -> None:
    body = b'{"texts": ["a"]}' if path.startswith("POST") else b""
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(f"{path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            client.shutdown(socket.SHUT_WR)
            assert rest(client).startswith(b"HTTP/1.1 200 ")


def test_who_sends_no_more_before_all_is_there_has_no_answer(port: int) -> None:
    for begun in (b"", HEAD, HEAD + b"Content-Length: 99\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(begun)
            client.shutdown(socket.SHUT_WR)
            assert rest(client) == b""


EMPTY = st.sampled_from([b"", b"\r\n", b"\n", b"\r\n\r\n"])


@settings(max_examples=30, deadline=None)
@given(before=EMPTY, between=EMPTY, again=EMPTY, behind=EMPTY, cut=st.integers(0, 200))
def test_empty_lines_before_a_request_and_behind_a_body_are_none_of_it(
    before: bytes, between: bytes, again: bytes, behind: bytes, cut: int, port: int
) -> None:
    body = b'{"texts": ["a"]}'
    first, last = HEAD + b"Content-Length: 16\r\n\r\n" + body, HEAD + b"Connection: close\r\nContent-Length: 16\r\n\r\n" + body
    content = before + first + between + again + last + behind
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(content[:cut])
        time.sleep(0.01)  # so that they arrive apart
        client.sendall(content[cut:])
        found = rest(client)
    assert found.count(b"HTTP/1.1 200 ") == 2 and b"HTTP/1.1 400" not in found


def test_an_answer_that_takes_long_ends_soon_after_its_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HALF_CLOSED", 0.01)
    messages = list[str]()

    async def go() -> bytes:
        left = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while not messages or messages[-1] != "http.disconnect":
                messages.append((await receive())["type"])
            left.set()

        listening = listen("127.0.0.1", 0, 1)
        server = Server(uvicorn.Config(app, http=connection(60), log_level="critical", lifespan="off"), lambda: False)
        serving = asyncio.create_task(server.serve([listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")
        writer.write_eof()
        found = await reader.read()
        await left.wait()
        writer.close()
        server.should_exit = True
        await serving
        return found

    assert asyncio.run(asyncio.wait_for(go(), HANG)) == b"" and messages == ["http.request", "http.disconnect"]


def test_what_was_asked_before_a_signal_is_answered_however_long_that_takes() -> None:
    """uvicorn by itself gives requests up that are not answered within `timeout_graceful_shutdown`, here at once."""
    asked = set[int]()

    async def go() -> bytes:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            asked.add(1)
            begun.set()
            await go_on.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"done"})
            asked.clear()

        listening = listen("127.0.0.1", 0, 1)
        place = listening.getsockname()
        config = uvicorn.Config(app, http=connection(60), log_level="critical", lifespan="off", timeout_graceful_shutdown=0)
        server = Server(config, lambda: bool(asked))
        serving = asyncio.create_task(server.serve([listening]))
        answer = asyncio.create_task(asyncio.to_thread(sent, place[1], HEAD + b"Content-Length: 0\r\n\r\n"))
        await begun.wait()
        server.handle_exit(signal.SIGTERM, None)
        while server.servers[0].is_serving():
            await asyncio.sleep(0.01)
        for _ in range(20):  # it does not give up
            await asyncio.sleep(0.01)
        go_on.set()
        await serving
        return await answer

    assert asyncio.run(go()).startswith(b"HTTP/1.1 200 ")


def test_a_second_ctrl_c_ends_it_at_once_and_says_so(trained_run: BertRun) -> None:
    process, port = start(trained_run, "--timeout=600")
    with process, socket.create_connection(("127.0.0.1", port)) as under_way:
        under_way.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        assert ask(port, "/health")[0] == 200
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(ConnectionRefusedError):  # until it has heard the first one
            while True:
                socket.create_connection(("127.0.0.1", port)).close()
        process.send_signal(signal.SIGINT)
        code, output = process.end()
    assert code == 130 and output == "stopped at once: requests in progress got no answer\n"


def test_a_port_that_is_taken_and_settings_that_are_wrong_are_named(trained_run: BertRun, capsys: Captured) -> None:
    source = str(trained_run.run_dir)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--from", source, f"--port={taken.getsockname()[1]}"]) == 2
    assert "cannot be listened on: Address already in use" in capsys.readouterr().err
    for word, message in (
        ("--host=a..b", "--host = a..b"),
        ("--port=70000", "--port = 70000"),
        ("--timeout=0", "--timeout = 0"),
        ("--max-texts=0", "--max-texts = 0"),
    ):
        assert main(["serve", "--from", source, word]) == 2
        assert message in capsys.readouterr().err


def test_what_is_written_to_a_connection_leaves_at_once() -> None:
    with listen("127.0.0.1", 0, 1) as listening, socket.create_connection(listening.getsockname()) as client:
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        assert client.getpeername() == listening.getsockname()


def test_an_address_that_is_of_one_link_is_listened_on_with_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    given, made = ("fe80::1", 0, 0, 7), socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **more: [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", given)])
    monkeypatch.setattr(socket, "create_server", lambda address, **more: made if address == given else None)
    with listen("fe80::1%link", 0, 1) as listening:
        assert listening is made
