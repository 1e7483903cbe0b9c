"""What a launch opens to others: on one machine nothing beyond it, and what is written there is never unpickled."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
import yaml

from overnight.distributed import elastic as agent_module
from overnight.distributed.elastic import Host, meet
from overnight.distributed.leader import Leader
from overnight.distributed.wire import Channel, Gone, is_loopback, key_of, listening
from overnight.errors import UserError
from tests.conftest import ROOT, tiny_tree


class Payload:
    """What a pickle can hold: reading it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def listeners(job: psutil.Process) -> dict[tuple[str, int], int]:
    """Addresses at which a process and all that it started listen, TCP and UDP, with their process."""
    found = {}
    for process in (job, *job.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                # A UDP socket with a peer hears that peer alone: a question to the name server, open for a moment.
                waits = connection.status == psutil.CONN_LISTEN or (connection.status == psutil.CONN_NONE and not connection.raddr)
                if waits and connection.laddr:
                    found[connection.laddr.ip, connection.laddr.port] = process.pid
    return found


def attack(host: str, port: int, value: bytes) -> None:
    """Write a value to the keys of a store where torch's rendezvous keeps a pickle, and a few others."""
    with contextlib.suppress(RuntimeError):
        store: Any = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=2))
        for key in ("torch.rendezvous.tiny", "torch.rendezvous.", "rank/0"):
            store.set(key, value)


@pytest.mark.slow
def test_a_launch_on_one_machine_listens_on_loopback_alone_and_unpickles_nothing(tmp_path: Path, tiny_data: Path) -> None:
    tree = tiny_tree(tmp_path, tiny_data.parent / "topics.jsonl")
    tree["data"]["dir"] = str(tiny_data)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    mark, seen = tmp_path / "unpickled", {}
    value = base64.b64encode(pickle.dumps(Payload(mark)))
    command = [sys.executable, "-m", "overnight", "launch", str(tmp_path / "recipe.yaml"), "--processes=2"]
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT)
    attacked: set[tuple[str, int]] = set()
    while job.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            seen |= listeners(psutil.Process(job.pid))
            meetings = {int(one.environ().get("MASTER_PORT", 0)) for one in psutil.Process(job.pid).children()}
            # Where the processes meet, and what the launcher itself opens.
            for place in {place for place, pid in seen.items() if place[1] in meetings or pid == job.pid} - attacked:
                attacked.add(place)
                attack(*place, value)
        time.sleep(0.1)  # to look takes as long as some steps
    assert job.returncode == 0, (tmp_path / "log").read_text()
    assert attacked, "two processes meet somewhere"
    assert [place for place in seen if not ip_address(place[0]).is_loopback] == []
    assert not mark.exists()


def test_a_key_is_made_once_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(key_of(tmp_path / "run"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 8
    assert (tmp_path / "run" / "launch.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["launch.key"]
    (tmp_path / "run" / "launch.key").write_text("cut")
    with pytest.raises(UserError, match=r"launch\.key is damaged: 3 bytes instead of 64"):
        key_of(tmp_path / "run")


def test_a_socket_listens_where_it_is_said_and_nowhere_else() -> None:
    found = listening("127.0.0.1", 0)
    assert found is not None and found.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError, match="in use"):
        listening("127.0.0.1", found.getsockname()[1])
    found.close()
    assert listening("192.0.2.1", 0) is None, "an address for documentation is no machine's"
    assert is_loopback("localhost") and is_loopback("::1") and not is_loopback("first.machine") and not is_loopback("10.0.0.1")


def here() -> socket.socket:
    """A socket that listens on loopback."""
    found = listening("127.0.0.1", 0)
    assert found is not None
    return found


Pair = Callable[[bytes, bytes], tuple[Channel, Channel]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Makes the two ends of a connection from the keys that they hold."""
    with ExitStack() as held:

        def make(ours: bytes, theirs: bytes) -> tuple[Channel, Channel]:
            server = held.enter_context(here())
            client = held.enter_context(socket.create_connection(server.getsockname()))
            return Channel(client, ours, client=True), Channel(held.enter_context(server.accept()[0]), theirs, client=False)

        yield make


def talk(*channels: Channel) -> list[list[dict[str, Any]]]:
    """What the channels hear while they all have something to hear."""
    heard: list[list[dict[str, Any]]] = [[] for _ in channels]
    for _ in range(8):
        for channel, messages in zip(channels, heard, strict=True):
            messages += [message for message in channel.receive() if message]
        time.sleep(0.005)
    return heard


KEY = b"k" * 64


def test_machines_that_know_the_key_understand_each_other(pair: Pair) -> None:
    one, two = pair(KEY, KEY)
    one.send({"ready": 5})
    one.send({"long": "x" * 60_000})
    two.send({"start": 0})
    assert talk(one, two) == [[{"start": 0}], [{"ready": 5}, {"long": "x" * 60_000}]]
    assert one.known and two.known
    two.close()
    with pytest.raises(Gone):
        talk(one)


def test_who_does_not_know_the_key_is_not_heard(pair: Pair) -> None:
    one, two = pair(KEY, b"x" * 64)
    two.send({"start": 0})
    with pytest.raises(Gone):
        talk(one, two)
    assert not one.known


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04cos\nsystem\n.", b"overnight 1 short\n", b"x" * 70_000])
def test_junk_closes_a_channel(junk: bytes) -> None:
    with here() as server, socket.create_connection(server.getsockname()) as client, server.accept()[0] as connection:
        channel = Channel(connection, KEY, client=False)
        client.sendall(junk)
        with pytest.raises(Gone):
            talk(channel)


def held_back(channel: Channel) -> bytes:
    """A message as it would be sent."""
    channel._flush = lambda: None  # type: ignore[method-assign]
    channel.send({"ready": 5})
    return channel._out


def test_a_message_that_was_changed_or_repeated_closes_a_channel(pair: Pair) -> None:
    for change in (lambda line: line.replace(b"5}", b"6}"), lambda line: line + line):
        one, two = pair(KEY, KEY)
        talk(one, two)
        one.connection.sendall(change(held_back(one)))
        with pytest.raises(Gone):
            talk(two)


def test_what_a_machine_said_is_not_taken_for_an_answer(pair: Pair) -> None:
    one, two = pair(KEY, KEY)
    talk(one, two)
    two.connection.sendall(held_back(one))
    with pytest.raises(Gone):
        talk(one)


def test_a_machine_whose_job_has_another_key_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_ANSWER", 1.0)
    with here() as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        stop = threading.Event()

        def serve() -> None:
            host = Host(Leader((2, 2), 0, time.monotonic()), server, "127.0.0.1", KEY)
            while not stop.is_set():
                host.receive()
                time.sleep(0.01)
            host.close(0)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(UserError, match=r"do not meet at .*does not have the key of this job, which is in"):
                meet(endpoint, (2, 2), 0, tmp_path)
        finally:
            stop.set()
            thread.join()
