"""One machine's part of a job of many processes: torch's elastic agent, and the exit code of what it started.

`torchrun` is the same agent. Its command ends with 1 however its processes ended, and after a failure it starts them again also where that
cannot help: after a wrong recipe, or a signal that asked the job to stop.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from overnight.errors import ConfigError, UserError
from overnight.train.signals import STOPS

_CAUSES = {
    signal.SIGKILL: ": a kill -9, or the system's where memory is short",
    signal.SIGBUS: ": often a full /dev/shm, or a file that was cut",
}
# Exit codes after which a restart would end the same way, or was not asked for.
_STOPPED = frozenset(128 + number for number in STOPS)
_FINAL = _STOPPED | {ConfigError.exit_code}
# Seconds from SIGTERM to SIGKILL for the processes that a failed one leaves behind, and which wait for it.
_AFTER_FAILURE = 10
# Seconds that a machine may be missing.
_SILENCE = 15


class Agent(LocalElasticAgent):
    """Starts, watches and stops the processes of one machine; restarts them where that can help."""

    _complete = math.inf
    """When all machines were last there, on the monotonic clock."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        _, code = cause(result.failures)
        if (code in _STOPPED or result.state is WorkerState.HEALTHY) and self._rdzv_handler.num_nodes_waiting():
            # All begin again, to let a machine in. For that another agent may have stopped its processes, and so all: no failure.
            return RunResult(state=WorkerState.HEALTHY)
        if result.state is WorkerState.HEALTHY and self._lost_machine(worker_group):
            return RunResult(state=WorkerState.FAILED)
        if code in _FINAL:
            self._remaining_restarts = 0
        return result

    def _lost_machine(self, worker_group: WorkerGroup) -> bool:
        # One that lost its power or its network says no goodbye, and the others would wait half an hour for its numbers. The rendezvous,
        # which was just read, drops who was silent for 15 s. Also silent is an agent whose processes are done, while others end.
        assert isinstance(self._rdzv_handler, DynamicRendezvousHandler)
        now = time.monotonic()
        if len(self._rdzv_handler._state_holder.state.participants) >= (worker_group.group_world_size or 1):
            self._complete = now
        return now - self._complete > _SILENCE

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # Healthy ones end for a machine that comes: their checkpoint may take its time.
        self._shutdown(timeout=self._shutdown_timeout if worker_group.state is WorkerState.HEALTHY else _AFTER_FAILURE)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _AFTER_FAILURE) -> None:
        try:
            super()._shutdown(death_sig if death_sig in STOPS else signal.SIGTERM, timeout)
        except SignalException as again:  # such as Ctrl-C for the second time
            super()._shutdown(again.sigval, timeout)

    def exit_codes(self) -> list[int]:
        """How those processes ended that did not end well, now that all have; negative where a signal killed them."""
        result = self._pcontext.wait(0) if self._pcontext else None
        return [failure.exitcode for failure in result.failures.values()] if result else []


def cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, int]:
    """The process that failed first and its exit code, negative where a signal killed it; (0, 0) where none did.

    Args:
        failures: by number of the process, in the order they were seen; also of those that the agent then stopped, or killed after 30 seconds.
    """
    if not failures:
        return 0, 0
    began = min(failure.timestamp for failure in failures.values())
    first = [(rank, failure.exitcode) for rank, failure in failures.items() if failure.timestamp == began]
    # Who was killed comes before who ended with 1 in the same second, having lost it.
    return next(((rank, code) for rank, code in first if code < 0 and code != -signal.SIGTERM), first[0])


def run_agent(arguments: Sequence[str], nodes: tuple[int, int], processes: int, endpoint: str, name: str, restarts: int, grace: int) -> int:
    """Run a command of this package in many processes, this machine's part, to its end.

    Args:
        arguments: of `python -m overnight`.
        nodes: machines, at least and at most.
        processes: on this machine.
        endpoint: host:port of the rendezvous, on one of the machines; empty for this machine alone.
        name: of the job; all its machines say the same.
        restarts: how often to start again after a failure.
        grace: seconds from a signal to the end of the processes, in which they write a checkpoint.

    Returns:
        the exit code that the processes agree on: 0 done, 1 failed, 2 usage, 130, 138 or 143 stopped by a signal, with a checkpoint.

    Raises:
        UserError: when a process was killed, or the other machines were not found or are gone.
    """
    # A failure is said by the process that has it, and the rest below.
    for logger in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT,SIGTERM,SIGUSR1,SIGHUP,SIGQUIT"
    # Else torch keeps the address of the first round's store where the first machine has changed, and its keys where it has not.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    where = RendezvousParameters("c10d", endpoint or "localhost:0", name, nodes[0], nodes[1], local_addr=None if endpoint else "localhost")
    try:
        handler = get_rendezvous_handler(where)
        spec = WorkerSpec(
            role="overnight",
            local_world_size=processes,
            rdzv_handler=handler,
            entrypoint=sys.executable,
            # torch fills in $names in arguments.
            args=("-u", "-m", "overnight", *(argument.replace("$", "$$") for argument in arguments)),
            max_restarts=restarts,
            monitor_interval=0.1,
        )
        agent = Agent(spec, DefaultLogsSpecs(log_dir=os.devnull), shutdown_timeout=grace)
        try:
            result = agent.run()
        except SignalException as stop:
            return after_signal(stop.sigval if stop.sigval in STOPS else signal.SIGTERM, agent.exit_codes(), grace)
        handler.shutdown()
    except RendezvousError as error:
        raise UserError(
            f"the machines of this job do not meet at {endpoint or 'localhost'}: {error or type(error).__name__}; "
            "is the machine there running the same command? The same command continues"
        ) from None
    if result and result.is_failed() and not result.failures:
        raise UserError("a machine of this job is not heard of any more; the same command continues")
    return after_failure(*cause(result.failures)) if result else 0


def after_failure(rank: int, code: int) -> int:
    """The exit code of a job from that of the process that failed first, which said why unless it was killed.

    Raises:
        UserError: when it was killed.
    """
    if code >= 0:
        return code
    if -code in STOPS:  # before it could listen to signals
        return 128 - code
    killer = signal.Signals(-code)
    raise UserError(f"process {rank} was killed by {killer.name}{_CAUSES.get(killer, '')}; the same command continues")


def after_signal(number: int, codes: Collection[int], grace: int) -> int:
    """The exit code of a job that was asked to stop, from those of its processes that did not end well; it may have been done, or have failed."""
    if -signal.SIGKILL in codes:
        print(f"overnight: not all processes ended within {grace} s; the run goes on from its newest checkpoint", file=sys.stderr)
    if not codes:
        return 0
    return 1 if 1 in codes else 128 + number
