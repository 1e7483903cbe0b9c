"""Addresses: how they may be shown, and where a mirror has what is published there."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from overnight.errors import ConfigError


def shown(address: str) -> str:
    """Return an address as it may be printed and stored: without user and password, and without what follows `?`, which may be a key."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return "an address that is none"
    query = "..." if parts.query else ""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, ""))


def host_of(address: str) -> str:
    """Return scheme, host and port of an address, which together say whom it speaks to."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2].lower()}"


@dataclass(frozen=True)
class Mirror:
    """A server or a folder that has the published files, each at its host and path: `MIRROR/dumps.wikimedia.org/enwiki/...`."""

    root: str
    """An address without user and password, or a folder."""
    is_folder: bool
    authorization: str = field(default="", repr=False)
    """Header that the server wants, made of user and password; sent to the mirror alone, never shown."""

    @property
    def host(self) -> str:
        return "" if self.is_folder else host_of(self.root)

    def place(self, address: str) -> str | Path:
        """Return where the mirror has a file; a folder may also have it directly, by its name alone."""
        parts = urlsplit(address)
        if not self.is_folder:
            return f"{self.root}/{parts.netloc}{parts.path}"
        below = Path(self.root, parts.netloc, *unquote(parts.path).split("/"))
        beside = Path(self.root, unquote(parts.path).rpartition("/")[2])
        return beside if not below.exists() and beside.is_file() else below


def mirror_of(text: str, setting: str) -> Mirror | None:
    """Return the mirror that a setting names: the address of a server or a folder; None where it is empty.

    Args:
        text: `https://...`, `http://...` or a path.
        setting: its name, for errors.

    Raises:
        ConfigError: when it is neither; a password in it is not repeated.
    """
    if not text:
        return None
    if "://" not in text:
        folder = Path(text).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"{setting} = {text}: is neither a folder nor an address such as https://mirror.example.org")
        return Mirror(str(folder), True)
    try:
        parts = urlsplit(text)
        name, password, host, _ = parts.username, parts.password, parts.hostname, parts.port
    except ValueError:
        raise ConfigError(f"{setting}: is not an address; write it like https://mirror.example.org:8080/data") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError(f"{setting} = {shown(text)}: must begin with https:// or http:// and a host, without ? and #; or name a folder")
    root = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
    word = f"{unquote(name or '')}:{unquote(password or '')}"
    return Mirror(root, False, f"Basic {base64.b64encode(word.encode()).decode()}" if name or password else "")
