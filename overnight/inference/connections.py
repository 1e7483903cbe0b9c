"""The connections of `overnight serve`: where it listens, how long a client may take for the headers of a request, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from overnight.errors import ConfigError
from overnight.signals import stop_signals

# For so long a client that sends no more may wait for its answer (s): one that has left looks the same until it is written to.
_HALF_CLOSED = 1.0
# What ends a line: an empty one before a request is none of it (RFC 9112, 2.2).
_LINE_ENDS = b"\r\n"


def connection(seconds: float) -> type[H11Protocol]:
    """Return what uvicorn makes of each connection, on which the headers of a request have to arrive within some seconds; it has no such limit."""

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.late = self.loop.call_later(seconds, self.give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            self.late.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
                data = data.lstrip(_LINE_ENDS)
            if not data or self.conn.their_state is h11.MUST_CLOSE:  # it said that its request was the last one
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:  # the headers are there, and their body has a time of its own
                self.late.cancel()
            elif self.late.cancelled():  # of a further request by the same connection
                self.late = self.loop.call_later(seconds, self.give_up)

        def on_response_complete(self) -> None:
            rest = self.conn.trailing_data[0]
            if self.conn.our_state is self.conn.their_state is h11.DONE and rest.startswith((b"\r", b"\n")):
                # h11 takes nothing out of what came: a new one reads what follows the empty lines.
                self.conn = h11.Connection(h11.SERVER)
                super().on_response_complete()
                self.data_received(rest)
            else:
                super().on_response_complete()

        def eof_received(self) -> bool:  # type: ignore[override]
            """Return whether the connection stays open: for the answer to a request that is there whole."""
            asked = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
            if asked:
                self.cycle.keep_alive = False
                self.loop.call_later(_HALF_CLOSED, self.transport.close)
            return asked

        def give_up(self) -> None:
            if self.conn.trailing_data[0]:
                self.refuse(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not arrive within {seconds:g} seconds")
            else:
                self.transport.close()

        def send_400_response(self, msg: str) -> None:
            self.refuse(HTTPStatus.BAD_REQUEST, "is no request of HTTP/1.1 or 1.0")

        def refuse(self, status: HTTPStatus, why: str) -> None:
            body = json.dumps({"error": why}).encode()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    return Connection


class Server(uvicorn.Server):
    """A server that ends where it stands in the program, without the signal being raised once more, when what it was asked is answered; a second Ctrl-C ends the process at once.

    Args:
        config: of uvicorn.
        busy: whether there are requests without an answer.
    """

    def __init__(self, config: uvicorn.Config, busy: Callable[[], bool]) -> None:
        super().__init__(config)
        self.busy = busy

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in stop_signals() - {signal.SIGUSR1}}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            # The thread of the model cannot be interrupted, and an interpreter that ends under it aborts.
            print("stopped at once: requests in progress got no answer", file=sys.stderr, flush=True)
            os._exit(128 + signal.SIGINT)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, and let the model answer, however long that takes.

        What follows, that clients read their answers, is given `timeout_graceful_shutdown` seconds.
        """
        for server in self.servers:
            server.close()
        for open_one in list(self.server_state.connections):
            open_one.shutdown()
        while self.busy():
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)


def listen(host: str, port: int, waiting: int) -> socket.socket:
    """Return a socket that listens; what is written to its connections leaves at once.

    Without that (Nagle's algorithm, RFC 896) the body of an answer waits for the client to have the headers acknowledged, for which that takes 40 ms.
    asyncio sees to it only for sockets that it makes itself.

    Args:
        host, port: as of :func:`overnight.inference.server.serve`.
        waiting: requests that may wait.

    Raises:
        ConfigError: as :func:`overnight.inference.server.serve`.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port = {port}: must be from 0, any that is free, to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address, family=family, backlog=2 * waiting)
    except (OSError, UnicodeError) as error:  # a name with an empty part is none of IDNA
        why = error.strerror if isinstance(error, OSError) else "no such name"
        raise ConfigError(f"--host = {host}, --port = {port}: cannot be listened on: {why}; --port=0 is any that is free") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it
    return listening
