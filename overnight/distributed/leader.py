"""What the machines of a job do together: who begins, with which numbers, when all begin again, and how the job ends.

Decisions alone, from what was heard; nothing here is sent, started or waited for (:mod:`overnight.distributed.elastic` does that).

A machine says `ready` (its processes may begin; the port where they can meet on it), `ended` (a process, with its exit code) and `stop` (it got a
signal). It is told to `start`, to begin `again` (stop its processes and be ready), and that the job is at its `end`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from overnight.distributed.wire import Message
from overnight.errors import ConfigError
from overnight.signals import STOP_SIGNALS

# Exit codes after which a restart would end the same way, or was not asked for.
STOPPED = frozenset(128 + number for number in STOP_SIGNALS)
FINAL = STOPPED | {ConfigError.exit_code}
# Seconds in which others are waited for once enough machines are there; and for enough to come at all.
_LAST_CALL, _COME = 10.0, 600.0
# Seconds from the first failure, in which that of the process that caused it is heard.
_SETTLE = 1.0


@dataclass
class Machine:
    """One of those that take part."""

    host: str
    """Its name."""
    address: str
    """Where the others reach it."""
    processes: int
    port: int = 0
    """Where its first process would meet the others; 0 while it is not ready."""
    first: int = 0
    """Rank of its first process."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit codes in this round, by local number; negative where a signal killed the process."""


@dataclass
class Failure:
    """A process that did not end well, or a machine that was lost (without a rank)."""

    time: float
    code: int
    host: str
    rank: int | None = None


class Leader:
    """Decides for all machines.

    Args:
        nodes: machines, at least and at most.
        restarts: how often to begin again after a failure.
        now: seconds, on the clock of all calls.
    """

    def __init__(self, nodes: tuple[int, int], restarts: int, now: float) -> None:
        self.least, self.most = nodes
        self.restarts = restarts
        self.machines: dict[int, Machine] = {}
        """All that are there, by some number, in the order in which they came."""
        self.active: list[int] = []
        """Those that train, in the order of their ranks; empty between rounds."""
        self.round = 0
        self.over = False
        self._orders: list[tuple[int, Message]] = []
        self._failures: list[Failure] = []
        self._stop = 0
        self._since = self._changed = now

    def hear(self, number: int, message: Message, address: str, now: float) -> None:
        """Take note of a message of a machine that is, or now comes."""
        if "ready" in message:
            machine = self.machines.setdefault(number, Machine(message["host"], address, message["processes"]))
            machine.port, self._changed = message["ready"], now
        elif "ended" in message:
            at, local, code = message["ended"]
            if at == self.round and number in self.active:
                machine = self.machines[number]
                machine.codes[local] = code
                if code:
                    self._failures.append(Failure(now, code, machine.host, machine.first + local))
        elif "stop" in message:
            self._stop = message["stop"]

    def lose(self, number: int, now: float) -> None:
        """Take note that a machine is gone."""
        machine = self.machines.pop(number, None)
        self._changed = now
        if machine and number in self.active:
            self.active.remove(number)
            self._failures.append(Failure(now, 1, machine.host))

    def decide(self, now: float) -> list[tuple[int, Message]]:
        """Return the orders, with the machines that they are for."""
        if not self.over:
            if self.active or self._failures:
                self._end_or_restart(now)
            else:
                self._gather(now)
        orders, self._orders = self._orders, []
        return orders

    def _gather(self, now: float) -> None:
        if self._stop:
            self._end(128 + self._stop, "")
            return
        ready = [number for number, machine in self.machines.items() if machine.port]
        full = len(ready) >= self.most
        # Who still stops its processes of the last round will be there.
        enough = self.least <= len(ready) == len(self.machines) and now - self._changed >= _LAST_CALL
        if full or enough:
            self._start(ready[: self.most])
        elif now - self._since >= _COME:
            self._end(
                1, f"after {_COME / 60:.0f} minutes {len(ready)} of {self.least} machines have joined; start the same command on each"
            )

    def _start(self, numbers: list[int]) -> None:
        # By name, so that neighbors are so in the ranks too.
        self.active = sorted(numbers, key=lambda number: (self.machines[number].host, number))
        machines, first = [self.machines[number] for number in self.active], 0
        for machine in machines:
            machine.first, machine.codes = first, {}
            first += machine.processes
        for number, machine in zip(self.active, machines, strict=True):
            master = [machines[0].address, machines[0].port]
            self._orders.append((number, {"start": self.round, "first": machine.first, "world": first, "master": master}))

    def _end_or_restart(self, now: float) -> None:
        machines = [self.machines[number] for number in self.active]
        ended = all(len(machine.codes) == machine.processes for machine in machines)
        if not self._failures:
            if ended:
                self._end(0, "")
            elif (
                not self._stop
                and len(machines) < self.most
                and any(machine.port for number, machine in self.machines.items() if number not in self.active)
            ):
                self._again(now, healthy=True)
            return
        if not ended and now - self._failures[0].time < _SETTLE:
            return
        code, why = verdict(self._failures, len(machines) > 1)
        if self._stop:
            self._end(1 if any(failure.code == 1 for failure in self._failures) else 128 + self._stop, "")
        elif code in FINAL or not self.restarts:
            self._end(code, why)
        else:
            self.restarts -= 1
            self._again(now, healthy=False)

    def _again(self, now: float, healthy: bool) -> None:
        for number in self.active:
            self.machines[number].port = 0
            self._orders.append((number, {"again": healthy}))
        self.active, self._failures = [], []
        self.round += 1
        self._since = self._changed = now

    def _end(self, code: int, why: str) -> None:
        self.over = True
        self._orders += [(number, {"end": code, "why": why}) for number in self.machines]


_CAUSES: Mapping[int, str] = {
    signal.SIGKILL: ": by kill -9, or by the system where memory ran out",
    signal.SIGBUS: ": often a full /dev/shm, or a file that was cut",
}


def verdict(failures: list[Failure], several: bool) -> tuple[int, str]:
    """Return the exit code of a job from the failures of its processes, and what nobody else says of them.

    Args:
        failures: in the order they were heard, within a second.
        several: whether to name the machine.
    """
    # Who was killed, and a machine that was lost, come before those that ended with 1 because they lost it.
    killed = next(
        (failure for failure in failures if failure.rank is not None and failure.code < 0 and failure.code != -signal.SIGTERM), None
    )
    lost = next((failure for failure in failures if failure.rank is None), None)
    failure = killed or lost or failures[0]
    if failure.rank is None:
        return 1, f"a machine of this job, {failure.host}, no longer answers; the same command continues"
    if failure.code >= 0:
        return failure.code, ""  # it has said why
    if -failure.code in STOP_SIGNALS:  # before it could listen to signals
        return 128 - failure.code, ""
    killer = signal.Signals(-failure.code)
    where = f" on {failure.host}" if several else ""
    return 1, f"process {failure.rank}{where} was killed by {killer.name}{_CAUSES.get(killer, '')}; the same command continues"
