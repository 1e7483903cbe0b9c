"""A server on loopback that has files, and serves them well or as badly as it is asked to."""

from __future__ import annotations

import base64
import hashlib
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = Callable[["Handler", bytes], None]


@dataclass
class Site:
    """What a server has, what it does wrong, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    """Of a path, for its next requests in order; after them it is served well."""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path and headers of each request."""
    password: str = ""
    """`user:password`, where one is wanted."""
    released: threading.Event = field(default_factory=threading.Event)
    """Ends what stalls."""
    address: str = ""

    def ranges(self, path: str) -> list[str]:
        """The ranges that were asked for, in order; empty for all."""
        return [headers.get("Range", "") for asked, headers in self.asked if asked == path]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    site: Site
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        content = self.site.files.get(self.path)
        self.close_connection = True
        self.start(404 if content is None else 200, content or b"", len(content or b""))

    def do_GET(self) -> None:
        self.site.asked.append((self.path, dict(self.headers)))
        self.close_connection = True
        word = base64.b64encode(self.site.password.encode()).decode()
        if self.site.password and self.headers.get("Authorization") != f"Basic {word}":
            self.start(401, b"")
            return
        content = self.site.files.get(self.path)
        faults = self.site.faults.get(self.path)
        if faults:
            faults.pop(0)(self, content or b"")
        elif content is None:
            self.start(404, b"")
        else:
            self.serve(content)

    def serve(self, content: bytes) -> None:
        """Serve a file well, with Range and If-Range."""
        first, length = self.first(content), len(content)
        if first is None:
            self.start(200, content, length)
        elif first >= length:
            self.start(416, content, 0, {"Content-Range": f"bytes */{length}"})
        else:
            content_range = f"bytes {first}-{self.last(content)}/{length}"
            self.start(206, content, self.last(content) - first + 1, {"Content-Range": content_range})
            content = content[first : self.last(content) + 1]
        if first is None or first < length:
            self.wfile.write(content)

    def first(self, content: bytes) -> int | None:
        """The byte that was asked for, unless the file is another one than that of which there is a part."""
        wanted = self.headers.get("If-Range")
        if "Range" not in self.headers or (wanted and wanted != etag(content)):
            return None
        return int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])

    def last(self, content: bytes) -> int:
        """The last byte that was asked for."""
        wanted = self.headers.get("Range", "").partition("-")[2]
        return min(int(wanted or len(content)), len(content) - 1)

    def start(self, status: int, content: bytes, length: int | None = 0, more: dict[str, str] | None = None) -> None:
        """Send the head of an answer."""
        self.send_response(status)
        headers = {"ETag": etag(content)} | ({} if length is None else {"Content-Length": str(length)}) | {"Connection": "close"}
        for name, value in (headers | (more or {})).items():
            if value:
                self.send_header(name, value)
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        pass


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def cut(after: int) -> Fault:
    """Close the connection after some bytes of the answer's body."""

    def fault(handler: Handler, content: bytes) -> None:
        first = handler.first(content) or 0
        if first:
            head = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"}
            handler.start(206, content, len(content) - first, head)
        else:
            handler.start(200, content, len(content))
        handler.wfile.write(content[first : first + after])

    return fault


def stall(after: int) -> Fault:
    """Send some bytes and then nothing, until the test ends."""

    def fault(handler: Handler, content: bytes) -> None:
        cut(after)(handler, content)
        handler.wfile.flush()
        handler.site.released.wait(600)

    return fault


def status(code: int, **headers: str) -> Fault:
    """Answer with a status, and headers that have a dash where their name has an underscore here."""
    return lambda handler, content: handler.start(code, b"", 0, {name.replace("_", "-"): value for name, value in headers.items()})


def other(content: bytes, **headers: str) -> Fault:
    """Send other bytes than the file's, whatever was asked for."""

    def fault(handler: Handler, _: bytes) -> None:
        handler.start(200, content, len(content), {name.replace("_", "-"): value for name, value in headers.items()})
        handler.wfile.write(content)

    return fault


def no_ranges(after: int | None = None) -> Fault:
    """Send all from the first byte, whatever was asked for, and close after some bytes."""

    def fault(handler: Handler, content: bytes) -> None:
        handler.start(200, content, len(content))
        handler.wfile.write(content[:after])

    return fault


def unannounced(content: bytes) -> Fault:
    """Send bytes whose number is not said."""

    def fault(handler: Handler, _: bytes) -> None:
        handler.start(200, content, None)
        handler.wfile.write(content)

    return fault


@contextmanager
def serving(site: Site, context: ssl.SSLContext | None = None) -> Iterator[Site]:
    """Within it, the site is there at `site.address`, by https where there is a certificate."""
    handler = type("SiteHandler", (Handler,), {"site": site})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda request, client: None  # type: ignore[method-assign]  # whoever asked has gone
    site.address = f"http://127.0.0.1:{server.server_address[1]}"
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        site.address = f"https://localhost:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
