"""Faults of the audit: SIGKILL to processes and machines of a local stack."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from vcasgd.chaos.faults import await_fault
from vcasgd.errors import StackError, StoreError
from vcasgd.fleet.providers.local.processes import Process, kill_all, processes_of
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.schemas.fleet import Machine, MachineState
from vcasgd.stack import StackHome, StackState
from vcasgd.stack.layout import kind_of, replica_of, service_of
from vcasgd.stack.parts import mark
from vcasgd.store.connection import connect
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.sentinel import named_primary

#: Number of heartbeat intervals after which a worker does not count as training.
FRESH_HEARTBEATS = 4


class Target(StrEnum):
    """Kind of process that the audit kills.

    ``worker-notice`` is an eviction with notice; ``failover`` kills the primary of a replicated
    server, whose replica must then be promoted.
    """

    WORKER = "worker"
    WORKER_NOTICE = "worker-notice"
    SERVER = "server"
    TENSORS = "tensors"
    LEDGER = "ledger"
    CONTROLLER = "controller"
    HEAD = "head"
    FAILOVER = "failover"


@dataclass(frozen=True)
class Fault:
    """Fault that fired, with a check for recovery."""

    #: Kind of a part, or a :class:`Target`.
    target: str
    name: str
    at: float
    recovered: Callable[[], bool]


class Killer:
    """Fault injector for the parts of a stack and the machines of its local pool.

    Each method returns after its target is dead, and raises :class:`StackError` if it could not
    be killed, because a fault that did not fire proves nothing.
    """

    def __init__(
        self,
        home: StackHome,
        provider: LocalProvider,
        jobs: Jobs,
        job: str,
        *,
        heartbeat: float,
        services: Mapping[str, str],
    ) -> None:
        """Initialize with the URLs of replicated ``services`` by name."""
        self._home = home
        self._provider = provider
        self._jobs = jobs
        self._job = job
        self._services = services
        self._fresh_seconds = FRESH_HEARTBEATS * heartbeat

    def fire(self, target: Target, rng: random.Random) -> Fault:
        """Kill a random process or machine of the target's kind."""
        match target:
            case Target.WORKER:
                return self.take_worker(target, rng, None)
            case Target.WORKER_NOTICE:
                return self.take_worker(target, rng, rng.uniform(1.0, 4.0))
            case Target.FAILOVER:
                return self._fail_over(target, rng)
            case _:
                return self.kill_part(target, rng)

    # -- parts of the stack -------------------------------------------------------------------

    def kill_part(self, target: str, rng: random.Random) -> Fault:
        """Kill a part's process and all of its helpers, as a power failure would."""
        name = self.name_of(target, rng)
        self._await_replica(name)
        return self._kill_named(target, name)

    def processes_of_a_part(
        self, kind: str, rng: random.Random
    ) -> tuple[str, Process, Callable[[], set[Process]]]:
        """Return a part's name, its process, and a function that finds its helpers, too."""
        name = self.name_of(kind, rng)
        process = await_fault(lambda: self._part_process(name), f"no {name} to disturb")
        return name, process, lambda: processes_of(mark(self._home, name), process)

    def name_of(self, kind: str, rng: random.Random) -> str:
        """Return the name of a random part of a kind."""
        parts = StackState.read(self._home.path).parts
        return rng.choice(sorted(name for name in parts if kind_of(name) == kind))

    def _kill_named(self, target: str, name: str) -> Fault:
        process = await_fault(lambda: self._part_process(name), f"no {name} to kill")
        at = time.time()
        if not kill_all(mark(self._home, name), process) or process.alive():
            raise StackError(f"{name} could not be killed")
        return Fault(target, f"{name} {process.pid}", at, lambda: self._part_is_back(name, process))

    def _fail_over(self, target: Target, rng: random.Random) -> Fault:
        """Kill a primary, and wait until its replica is promoted."""
        service = rng.choice(sorted(self._services))
        self._await_replica(service)
        state, before = StackState.read(self._home.path), self._primary(service)
        name = next(each for each in (service, replica_of(service)) if state.ports[each] == before)
        fault = self._kill_named(target, name)
        await_fault(
            lambda: self._primary(service) not in (None, before), f"no new primary of {service}"
        )
        return fault

    def _primary(self, service: str) -> int | None:
        primary = named_primary(self._services[service])
        return primary[1] if primary else None

    def _await_replica(self, name: str) -> None:
        """Wait for the replica of a replicated server, because only one of the two may die."""
        url = self._services.get(service_of(name))
        if url is None:
            return
        client = connect(url)

        def has_replica() -> bool:
            try:
                return "online" in client.info("replication").get("slave0", {}).get("state", "")
            except StoreError:
                return False

        await_fault(has_replica, f"no replica of {name}")
        client.close()

    def _part_process(self, name: str) -> Process | None:
        part = StackState.read(self._home.path).parts[name]
        process = part.process
        return process if process is not None and part.ready and process.alive() else None

    def _part_is_back(self, name: str, old: Process) -> bool:
        process = self._part_process(name)
        return process is not None and process != old

    # -- machines -------------------------------------------------------------------------------

    def take_worker(self, target: Target, rng: random.Random, notice: float | None) -> Fault:
        """Kill a machine whose worker is training, or evict it with so many seconds of notice."""
        busy = self.await_busy()
        machine = rng.choice(busy)
        processes = self._provider.processes(machine.id)
        at, workers = time.time(), len(busy)
        if notice is None:
            self._provider.kill(machine.id)
        else:
            self._provider.evict(machine.id, notice)

        # An exiting process loses its marker first, so that only its number finds it.
        await_fault(
            lambda: self._is_gone(machine.id) and not any(each.alive() for each in processes),
            f"no end of {machine.id}",
        )
        return Fault(target, machine.id, at, lambda: len(self.busy_machines()) >= workers)

    def await_busy(self) -> list[Machine]:
        """Return the machines whose worker trains, once there is one."""
        busy = await_fault(self.busy_machines, "no machine with a training worker")
        return sorted(busy, key=lambda one: one.id)

    def _is_gone(self, machine: str) -> bool:
        present = {one.id for one in self._provider.machines()}
        return machine not in present and not self._provider.processes(machine)

    def busy_machines(self) -> list[Machine]:
        """Return the machines whose worker trains; none if the ledger does not answer."""
        try:
            beats = self._jobs.workers.heartbeats(self._job).values()
        except StoreError:
            return []
        fresh = time.time() - self._fresh_seconds
        training = {beat.machine for beat in beats if (beat.at or 0.0) > fresh and beat.steps}
        return [
            one
            for one in self._provider.machines()
            if one.id in training and one.state is MachineState.RUNNING
        ]
