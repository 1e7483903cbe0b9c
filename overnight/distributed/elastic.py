"""One machine's part of a job of many processes: starts them, watches them, stops them, and starts them again where that can help.

On one machine nothing listens but on the loopback interface. On several, the one that has the address of the rendezvous decides for all
(:mod:`overnight.distributed.leader`), and they talk in messages that only who knows the job's key can make (:mod:`overnight.distributed.wire`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from overnight.distributed.leader import STOPPED, Leader
from overnight.distributed.wire import SILENCE, Channel, Gone, Message, is_loopback, key_of, listening
from overnight.errors import UserError
from overnight.signals import STOP_SIGNALS, stop_signals

# Seconds from SIGTERM to SIGKILL for the processes that a failed one leaves behind, and which wait for it.
_AFTER_FAILURE = 10
# Seconds between two looks, and in which the machine of the rendezvous must answer.
_LOOK, _ANSWER = 0.05, 60.0
# Connections at a time.
_CHANNELS = 1024


class Host:
    """The machine that decides for all, or is alone.

    Args:
        server: where the others come; None on one machine.
        address: where the others reach this one.
    """

    def __init__(self, leader: Leader, server: socket.socket | None, address: str, key: bytes) -> None:
        self.address, self._leader, self._server, self._key = address, leader, server, key
        self._channels: dict[int, Channel] = {}
        self._count = 0
        if server is not None:
            server.setblocking(False)

    def send(self, message: Message) -> None:
        """Send a message as one of the machines."""
        self._leader.hear(0, message, self.address, time.monotonic())

    def receive(self) -> list[Message]:
        """Return the orders for this machine; those for the others are sent."""
        self._accept()
        for number, channel in list(self._channels.items()):
            try:
                for message in channel.receive():
                    peer = str(channel.connection.getpeername()[0])
                    # Both are on this machine: the others know it by its name.
                    self._leader.hear(number, message, self.address if is_loopback(peer) else peer, time.monotonic())
            except (Gone, OSError):
                channel.close()
                del self._channels[number]
                self._leader.lose(number, time.monotonic())
        own = []
        for number, order in self._leader.decide(time.monotonic()):
            if number == 0:
                own.append(order)
            elif number in self._channels:
                self._channels[number].send(order)
        return own

    def close(self, seconds: float) -> None:
        """Wait for the others, which may still be ending their processes."""
        deadline = time.monotonic() + seconds
        if self._server is not None:
            self._server.close()
            self._server = None
        while any(channel.known for channel in self._channels.values()) and time.monotonic() < deadline:
            self.receive()
            time.sleep(_LOOK)
        for channel in self._channels.values():
            channel.close()

    def _accept(self) -> None:
        while self._server is not None and len(self._channels) < _CHANNELS:
            try:
                connection, _ = self._server.accept()
            except OSError:  # nobody, or gone again
                return
            self._count += 1
            self._channels[self._count] = Channel(connection, self._key, client=False)


class Guest:
    """A machine for which another one decides."""

    def __init__(self, channel: Channel, address: str) -> None:
        self.address, self._channel = address, channel

    def send(self, message: Message) -> None:
        """Send a message to the machine that decides."""
        self._channel.send(message)

    def receive(self) -> list[Message]:
        """Return the orders for this machine.

        Raises:
            Gone.
        """
        return [message for message in self._channel.receive() if message]

    def close(self, seconds: float) -> None:
        """Say goodbye."""
        self._channel.close()


def meet(endpoint: str, nodes: tuple[int, int], restarts: int, folder: Path) -> Host | Guest:
    """Decide for all machines where the endpoint is this one's, else find the machine that does.

    Raises:
        UserError: when it is not found, or its job has another key.
    """
    leader = Leader(nodes, restarts, time.monotonic())
    if not endpoint:
        return Host(leader, None, "127.0.0.1", b"")
    host, _, port = endpoint.rpartition(":")
    host, key = host.strip("[]"), key_of(folder)
    begin, error = time.monotonic(), OSError("no answer")
    while time.monotonic() - begin < _ANSWER:
        try:
            if (server := listening(host, int(port))) is not None:
                return Host(leader, server, host, key)
        except OSError as taken:  # by another launch of this machine
            error = taken
        try:
            channel = Channel(socket.create_connection((host, int(port)), timeout=5), key, client=True)
        except OSError as refused:
            error = refused
            time.sleep(0.2)
            continue
        try:
            while not channel.known:
                channel.receive()
                time.sleep(_LOOK)
        except Gone:
            error = OSError(f"the process that listens there does not have the key of this job, which is in {folder}")
            channel.close()
            time.sleep(0.2)
            continue
        own = str(channel.connection.getsockname()[0])
        return Guest(channel, host if is_loopback(own) else own)
    raise UserError(
        f"the machines of this job do not meet at {endpoint}: {error}; is the machine there running the same command? The same command continues"
    )


class Agent:
    """Starts and stops the processes of this machine as it is told, and tells how they ended.

    Args:
        command: of one process.
        processes: on this machine.
        grace: seconds from a signal to the end of the processes.
    """

    def __init__(self, link: Host | Guest, command: Sequence[str], processes: int, grace: int) -> None:
        self._link, self._command, self._count, self._grace = link, command, processes, grace
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reported: set[int] = set()
        self._round, self._deadline = 0, float("inf")
        self._place: socket.socket | None = None
        self._pipe = -1
        self._again = False
        """Whether to be ready again once the processes have ended."""
        self._end: Message | None = None
        self.signals: list[int] = []
        self.stopped = 0
        """The first signal."""

    def run(self) -> Message:
        """Take part to the end of the job, which is told."""
        # Nobody else has the end for writing, so a process notices when this one is killed (overnight.signals.terminate_at_end_of).
        self._pipe, ours = os.pipe()
        try:
            self._ready()
            while self._end is None or not self._ended():
                for order in self._link.receive():
                    self._obey(order)
                while self.signals:
                    self._forward(self.signals.pop(0))
                self._check_processes()
                if self._again and self._end is None and self._ended():
                    self._again, self._processes = False, []
                    self._ready()
                time.sleep(_LOOK)
        except Gone:
            raise UserError("the machine of the rendezvous no longer answers; the same command continues") from None
        finally:
            self._clear()
            os.close(ours)
            os.close(self._pipe)
        self._link.close(SILENCE + max(_AFTER_FAILURE, self._grace if self._end["end"] in STOPPED else 0))
        return self._end

    def codes(self) -> list[int]:
        """Return how those processes ended that did not end well; negative where a signal killed them."""
        return [process.returncode for process in self._processes if process.returncode]

    def _ready(self) -> None:
        self._place = listening(self._link.address, 0)
        port = self._place.getsockname()[1] if self._place else 0
        if not port:
            raise UserError(f"{self._link.address} is not an address of this machine, so the others could not reach it")
        self._link.send({"ready": port, "processes": self._count, "host": socket.gethostname()})

    def _obey(self, order: Message) -> None:
        if "start" in order:
            self._start(order)
        elif "again" in order:
            # Healthy processes end for a machine that comes: their checkpoint may take its time.
            self._stop(self._grace if order["again"] else _AFTER_FAILURE)
            self._again = True
        elif "end" in order:
            self._end = order
            self._stop(self._grace if order["end"] in STOPPED else _AFTER_FAILURE)

    def _start(self, order: Message) -> None:
        assert self._place is not None and not self._processes
        self._round = order["start"]
        (host, port), fd = order["master"], self._place.fileno()
        shared = {**os.environ, "WORLD_SIZE": str(order["world"]), "LOCAL_WORLD_SIZE": str(self._count), "MASTER_ADDR": host}
        # torchrun's name for the starts so far, which the lock of the run folder reads.
        shared |= {"MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(self._round)}
        # Else DDP says in every process that it looks for heads without a gradient, which only some phases have (distributed.wrap).
        shared.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        shared.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        if is_loopback(host):
            loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
            shared |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
        for local in range(self._count):
            rank = order["first"] + local
            own = {"RANK": str(rank), "LOCAL_RANK": str(local), "OVERNIGHT_LAUNCHER_FD": str(self._pipe)}
            if rank == 0:  # it gets the socket where the others come, which nobody else can have taken meanwhile
                own["OVERNIGHT_LISTEN_FD"] = str(fd)
            # In a session of its own, so that Ctrl-C comes once, from here.
            passed = (self._pipe, fd) if rank == 0 else (self._pipe,)
            self._processes.append(subprocess.Popen(self._command, env={**shared, **own}, pass_fds=passed, start_new_session=True))
        self._place.close()
        self._place, self._reported, self._deadline = None, set(), float("inf")

    def _ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes)

    def _send(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _stop(self, seconds: float) -> None:
        # Those that have got a signal are on their way.
        if not self.stopped:
            self._send(signal.SIGTERM)
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _forward(self, number: int) -> None:
        number = number if number in STOP_SIGNALS else signal.SIGTERM
        if not self.stopped:
            self.stopped = number
            self._deadline = min(self._deadline, time.monotonic() + self._grace)
            self._link.send({"stop": int(number)})
        self._send(number)

    def _check_processes(self) -> None:
        if time.monotonic() > self._deadline:
            self._send(signal.SIGKILL)
        for local, process in enumerate(self._processes):
            if local not in self._reported and (code := process.poll()) is not None:
                self._reported.add(local)
                self._link.send({"ended": [self._round, local, code]})

    def _clear(self) -> None:
        """Leave no process behind, also after an error."""
        if not self._ended():
            self._send(signal.SIGTERM)
            deadline = time.monotonic() + _AFTER_FAILURE
            while not self._ended() and time.monotonic() < deadline:
                time.sleep(_LOOK)
            self._send(signal.SIGKILL)
            for process in self._processes:
                process.wait()


@contextmanager
def _listening_to_signals(agent: Agent) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        agent.signals.append(number)

    before = {number: signal.signal(number, note) for number in {signal.SIGQUIT, *stop_signals()}}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_agent(
    arguments: Sequence[str], nodes: tuple[int, int], processes: int, endpoint: str, folder: Path, restarts: int, grace: int
) -> int:
    """Run a command of this package in many processes, this machine's part, to its end.

    Args:
        arguments: of `python -m overnight`.
        nodes: machines, at least and at most.
        processes: on this machine.
        endpoint: host:port of the rendezvous, on one of the machines; empty for this machine alone.
        folder: of the run; it keeps the key of a job of several machines.
        restarts: how often to start again after a failure.
        grace: seconds from a signal to the end of the processes, in which they write a checkpoint.

    Returns:
        the exit code that the processes agree on: 0 done, 1 failed, 2 usage, 130, 138 or 143 stopped by a signal, with a checkpoint.

    Raises:
        UserError: when a process was killed, or the other machines were not found or are gone.
    """
    link = meet(endpoint, nodes, restarts, folder)
    agent = Agent(link, [sys.executable, "-u", "-m", "overnight", *arguments], processes, grace)
    with _listening_to_signals(agent):
        end = agent.run()
    if agent.stopped and agent.codes():
        return after_signal(agent.stopped, agent.codes(), grace)
    if end["why"]:
        raise UserError(end["why"])
    return int(end["end"])


def after_signal(number: int, codes: Collection[int], grace: int) -> int:
    """Return the exit code of a job that was asked to stop, from those of its processes that did not end well; it may have been done, or have failed."""
    if -signal.SIGKILL in codes:
        print(f"overnight: not all processes ended within {grace} s; the run resumes from its newest checkpoint", file=sys.stderr)
    return 1 if 1 in codes else 128 + number
