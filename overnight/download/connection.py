"""One request: https, bounded redirects, and what an answer says about the file. The standard library sends it (docs/design.md says why)."""

from __future__ import annotations

import email.utils
import http.client
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLCertVerificationError, create_default_context
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from overnight import __version__
from overnight.download.addresses import Mirror, host_of, shown
from overnight.download.patience import Attempts, StoppedError, TemporaryError
from overnight.errors import DataError

MAX_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
# More digits than a file can have bytes are none of its length: int() refuses many with an error of its own.
_LENGTH = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-[0-9]+|[*])/([0-9]{1,18})")


class MissingError(DataError):
    """The server has no such file."""


@dataclass
class Answer:
    """A file, or the rest of one, that is about to come."""

    address: str
    """As it may be shown."""
    partial: bool
    """Whether it begins at `start`; else at the first byte, whatever was asked for."""
    start: int
    total: int | None
    """Bytes of the whole file, where it is said."""
    etag: str
    modified: str
    kind: str
    """The media type, such as text/html."""
    ends: bool
    """Whether its end is told from a connection that was lost: it has a length, or is sent in chunks."""
    _read: Callable[[int], bytes]
    close: Callable[[], Any]

    def read(self, most: int) -> bytes:
        """Return the next bytes, none at the end; an end that comes too early looks the same, unless it `ends`.

        Raises:
            TemporaryError: the connection was lost, or nothing came for too long.
        """
        try:
            return self._read(most)
        except TimeoutError:
            raise TemporaryError("nothing came for a while") from None
        except (OSError, http.client.HTTPException) as error:
            raise TemporaryError(f"the connection was lost ({_reason(error)})") from None


class Source:
    """Where files are got from: their publishers, or a mirror that stands for all of them.

    Args:
        mirror: the mirror.
        timeout: seconds without a byte after which a connection counts as lost.
        stop: set when the command ends.
    """

    def __init__(self, mirror: Mirror | None, timeout: float, stop: threading.Event) -> None:
        self.mirror, self.stop, self._timeout = mirror, stop, timeout
        self._schemes = ("http", "https") if mirror and mirror.root.startswith("http://") else ("https",)
        self._quiet_until: dict[str, float] = {}
        # Not urllib's usual opener: it would also open file: and ftp:, and follow redirects to http with every header.
        self._opener = urllib.request.OpenerDirector()
        context = create_default_context()
        for handler in (urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(context=context)):
            self._opener.add_handler(handler)

    def where(self, address: str) -> str:
        """Return from where a file is got, as it may be shown: the place in the mirror, where there is one."""
        place = self.mirror.place(address) if self.mirror else address
        return str(place) if isinstance(place, Path) else shown(place)

    def open(self, address: str, first: int = 0, validator: str = "") -> Answer:
        """Ask for a file, or for the rest of it.

        Args:
            address: where it is published.
            first: byte to begin at.
            validator: ETag or date of the bytes before; where the file has another one by now, all of it comes (If-Range).

        Raises:
            MissingError: there is no such file.
            TemporaryError: the server is busy or out of reach.
            DataError: the server refuses, or leads nowhere; with its address.
        """
        place = self.mirror.place(address) if self.mirror else address
        if isinstance(place, Path):
            return _open_file(place, first, shown(address))
        seen: list[str] = []
        while True:
            parts = urlsplit(place)
            if parts.scheme not in self._schemes:
                raise DataError(f"{shown(place)}: is not https; only a mirror that is itself named with http:// is read without encryption")
            response = self._send(place, first, validator)
            if response.status not in _REDIRECTS:
                return _answer(place, response)
            response.close()
            seen.append(place)
            try:
                place = urljoin(place, response.headers.get("Location", ""))
            except ValueError:
                raise DataError(
                    f"{shown(seen[0])}: redirects to something that is not an address; nothing can be downloaded there"
                ) from None
            if place in seen:
                raise DataError(f"{shown(seen[0])}: redirects in a circle ({shown(place)} comes up again); nothing can be downloaded there")
            if len(seen) > MAX_REDIRECTS:
                raise DataError(f"{shown(seen[0])}: redirects more than {MAX_REDIRECTS} times; nothing can be downloaded there")

    def read(self, address: str, most: int, attempts: Attempts) -> bytes:
        """Return a small file whole, with as many tries as there are.

        Raises:
            DataError: as of :meth:`open`; or it has more than `most` bytes.
        """
        while True:
            try:
                answer = self.open(address)
                try:
                    content = b""
                    while block := answer.read(1 << 16):
                        content += block
                        if len(content) > most:
                            raise DataError(f"{answer.address}: has more than {most:,} bytes, which no such file has")
                        if self.stop.is_set():
                            raise StoppedError
                finally:
                    answer.close()
                if answer.total is not None and len(content) != answer.total:
                    raise TemporaryError(f"it ended after {len(content):,} of {answer.total:,} bytes")
                return content
            except TemporaryError as error:
                attempts.failed(self.where(address), error, progressed=False, continues=False)

    def names(self, address: str, attempts: Attempts) -> list[str]:
        """Return what a page that lists a folder links to; of a mirror that is a folder, the names in that folder, or else in the mirror."""
        if self.mirror and self.mirror.is_folder:
            place = self.mirror.place(address)
            folder = place if isinstance(place, Path) and place.is_dir() else Path(self.mirror.root)
            return sorted(path.name for path in folder.iterdir())
        page = self.read(address, 16 << 20, attempts).decode("utf-8", "replace")
        return sorted({link.strip("/").rpartition("/")[2] for link in re.findall(r"""href=["']([^"'?#]+)["']""", page)})

    def _send(self, place: str, first: int, validator: str) -> Any:
        host = host_of(place)
        if self.stop.wait(max(0.0, self._quiet_until.get(host, 0.0) - time.monotonic())):
            raise StoppedError
        headers = {"User-Agent": f"overnight/{__version__} (a dataset downloader; Python urllib)", "Accept-Encoding": "identity"}
        if first:
            headers |= {"Range": f"bytes={first}-"} | ({"If-Range": validator} if validator else {})
        if self.mirror and self.mirror.authorization and host == self.mirror.host:
            headers["Authorization"] = self.mirror.authorization
        try:
            response = self._opener.open(
                urllib.request.Request(quote(place, safe=":/?&=%@~+,;!$'()*#[]"), headers=headers), timeout=self._timeout
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, SSLCertVerificationError):
                raise DataError(
                    f"{shown(place)}: its certificate cannot be trusted ({reason.verify_message}); nothing was downloaded"
                ) from None
            if isinstance(reason, ValueError | http.client.InvalidURL):
                raise DataError(f"{shown(place)}: is not an address that can be requested") from None
            if isinstance(reason, TimeoutError):
                raise TemporaryError("no answer in time") from None
            raise TemporaryError(f"no connection ({_reason(reason)})") from None
        if response is None:
            raise DataError(f"{shown(place)}: is not an address that can be requested")
        if response.status in _TEMPORARY:
            response.close()
            wait = _retry_after(response.headers.get("Retry-After", ""))
            # For all that is got from there at the same time.
            self._quiet_until[host] = max(self._quiet_until.get(host, 0.0), time.monotonic() + min(wait, 60.0))
            raise TemporaryError(f"answers {_status(response)}", wait)
        return response


def _status(response: Any) -> str:
    return f"{response.status} {http.client.responses.get(response.status, '')}".strip()


def _answer(place: str, response: Any) -> Answer:
    """Return what an answer says of its file; `start` of an answer that does not fit what was asked for is -1."""
    headers, where = response.headers, shown(place)
    if response.status not in (200, 206, 416):
        response.close()
        text = f"{where}: answers {_status(response)}"
        if response.status in (404, 410):
            raise MissingError(f"{text}; there is no such file, and --mirror names another place")
        raise DataError(f"{text}; what was downloaded is kept. Ask the publisher, or name another place with --mirror")
    if (encoding := headers.get("Content-Encoding", "identity")) != "identity":
        response.close()
        raise DataError(f"{where}: is sent compressed as {encoding}, which was not requested")
    start, total = 0, None
    if response.status == 200:
        length = headers.get("Content-Length", "")
        total = int(length) if _LENGTH.fullmatch(length) else None
    else:
        found = _RANGE.fullmatch(headers.get("Content-Range", ""))
        start, total = (int(found[1] or -1), int(found[2])) if found else (-1, None)
    kind = headers.get_content_type() if "Content-Type" in headers else ""
    etag, modified = headers.get("ETag", ""), headers.get("Last-Modified", "")
    ends = response.chunked or response.length is not None
    return Answer(where, response.status != 200, start, total, etag, modified, kind, ends, response.read1, response.close)


def _open_file(path: Path, first: int, published: str) -> Answer:
    """Return a file of a mirror that is a folder, as a server would send it; an error names the address where it is published."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - whoever reads the answer closes it
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise MissingError(f"{path}: is not in the mirror, neither there nor by its name alone; it is published at {published}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    size, changed = path.stat().st_size, path.stat().st_mtime_ns
    start = min(first, size)
    file.seek(start)
    return Answer(str(path), bool(first), start, size, f'"{size}-{changed}"', "", "", True, file.read, file.close)


def _retry_after(text: str) -> float:
    """Return the seconds of a Retry-After header, which are a number or a date."""
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _reason(error: object) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text)
