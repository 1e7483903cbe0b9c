"""A server, and whoever gets a file from it without ever waiting."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overnight.download.addresses import mirror_of
from overnight.download.connection import Source
from overnight.download.datasets import RemoteFile
from overnight.download.patience import Attempts
from overnight.download.transfer import Received, Transfer
from tests.download.server import Site, serving

HOST = "data.example.org"
CONTENT = random.Random(0).randbytes(1_000_000)
PATH = f"/{HOST}/sets/a.bin"


class Pauses(threading.Event):
    """The sign that the command ends; whoever waits for it does not, and how long it would have is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        if timeout:
            self.waited.append(timeout)
        return self.is_set()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what a machine says about proxies and mirrors."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "OVERNIGHT_MIRROR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site() -> Iterator[Site]:
    """A server with one file."""
    with serving(Site({PATH: CONTENT})) as found:
        yield found


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


Get = Callable[..., Received]


def checksum(content: bytes, kind: str = "sha256") -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


@pytest.fixture
def said() -> list[str]:
    """The lines for the user."""
    return []


@pytest.fixture
def get(site: Site, pauses: Pauses, said: list[str], tmp_path: Path) -> Get:
    """Gets the file of the server: get(size=..., checksum=..., retries=..., timeout=...)."""

    def one(retries: int = 3, timeout: float = 30.0, name: str = "a.bin", size: int | None = None, checksum: str = "") -> Received:
        source = Source(mirror_of(site.address, "--mirror"), timeout, pauses)
        file = RemoteFile(f"https://{HOST}/sets/{name}", name, size, checksum)
        attempts = Attempts(retries, pauses, said.append)
        return Transfer(file, tmp_path / name, source, attempts, lambda count: None, lambda total: None).receive()

    return one
