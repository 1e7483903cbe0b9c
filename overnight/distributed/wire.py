"""Messages between the machines of a job: JSON lines over TCP, each with a code that only who knows the job's key can make.

What arrives is checked before it is read, and it is only ever read as JSON. The key is a file in the run folder, which all machines of a job see:
who may write there may train there. Messages are not secret, so they are not encrypted.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from overnight.errors import UserError

Message = dict[str, Any]

_HELLO = b"overnight 1 "
_BEAT, SILENCE = 2.0, 15.0
"""Seconds between signs of life at most, and without one after which the other side counts as gone."""
_LONGEST = 1 << 16
"""Bytes of a message."""


class Gone(Exception):
    """The other side has closed, is silent, or does not know the key."""


def key_of(folder: Path) -> bytes:
    """Return the key of the job whose run folder this is; made by the first machine that asks."""
    path = folder / "launch.key"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            os.link(own, path)  # all at once, and only where there is none
        except FileExistsError:
            pass  # another machine was first
        finally:
            own.unlink(missing_ok=True)
    key = path.read_bytes()
    if len(key) != 64:
        raise UserError(f"{path} is damaged: {len(key)} bytes instead of 64; delete it, and start all machines again")
    return key


def is_loopback(host: str) -> bool:
    """Return whether an address, or the name `localhost`, means this machine alone, as it is written."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening(host: str, port: int) -> socket.socket | None:
    """Return a socket that listens at an address of this machine, and at no other; None where the host is another machine.

    A name that this machine alone takes for its loopback address (Debian writes it into /etc/hosts) is listened for on all addresses: the others
    know it by another one.

    Args:
        host: a name or an address.
        port: 0 for any that is free.

    Raises:
        OSError: when the name is not known, or the port is taken.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if is_loopback(str(address[0])) and not is_loopback(host):
            address = ("", *address[1:])
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A port that a job of a moment ago has left may be used again.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(1024)
            return found
        except OSError as error:
            found.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return None


class Channel:
    """One side of a connection; never waits.

    Args:
        connection: connected.
        key: of the job.
        client: whether this side asked for the connection.
    """

    def __init__(self, connection: socket.socket, key: bytes, client: bool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._key, self._client = connection, key, client
        self._nonce, self._session = secrets.token_hex(16).encode(), b""
        self._in, self._out = b"", _HELLO + self._nonce + b"\n"
        self._waiting: list[Message] = []
        self._received, self._sent = 0, 0
        self._heard = self._last_sent = time.monotonic()
        self.known = False
        """Whether the other side has shown that it knows the key."""

    def send(self, message: Message) -> None:
        """Send a message, now or in a later :meth:`receive`."""
        self._last_sent = time.monotonic()
        if not self._session:
            self._waiting.append(message)
            return
        body = json.dumps(message).encode()
        self._out += self._code(self._client, self._sent, body) + body + b"\n"
        self._sent += 1
        self._flush()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; also gives a sign of life.

        Raises:
            Gone.
        """
        now = time.monotonic()
        if now - self._last_sent > _BEAT:
            self.send({})
        self._flush()
        closed = not self._fill()
        found: list[Message] = []
        while b"\n" in self._in:
            line, self._in = self._in.split(b"\n", 1)
            if message := self._read(line):
                found.append(message)
        if len(self._in) > _LONGEST or (closed and not found) or now - self._heard > SILENCE:
            raise Gone
        return found

    def close(self) -> None:
        """Send what is left if that can be done at once, and close."""
        self._flush()
        self.connection.close()

    def _fill(self) -> bool:
        try:
            data = self.connection.recv(_LONGEST)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._in += data
        return bool(data)

    def _flush(self) -> None:
        try:
            while self._out:
                self._out = self._out[self.connection.send(self._out) :]
        except OSError:
            return  # full, or closed, which `receive` says

    def _read(self, line: bytes) -> Message:
        if not self._session:
            if not line.startswith(_HELLO) or len(line) != len(_HELLO) + len(self._nonce):
                raise Gone
            nonces = (self._nonce, line[len(_HELLO) :])
            self._session = hmac.digest(self._key, b" ".join(nonces if self._client else nonces[::-1]), hashlib.sha256)
            for message in [*self._waiting, {}]:
                self.send(message)
            self._waiting.clear()
            return {}
        code, body = line[:64], line[64:]
        if not hmac.compare_digest(code, self._code(not self._client, self._received, body)):
            raise Gone
        self._received += 1
        self._heard, self.known = time.monotonic(), True
        read: Message = json.loads(body)
        return read

    def _code(self, client: bool, number: int, body: bytes) -> bytes:
        return hmac.new(self._session, b"%d %d " % (client, number) + body, hashlib.sha256).hexdigest().encode()
