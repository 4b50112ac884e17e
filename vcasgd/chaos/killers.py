"""What kills: each target of the audit, on the embedded stack, with SIGKILL to real processes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from vcasgd.errors import StackError, StoreError
from vcasgd.fleet.providers.base import Instance, InstanceState
from vcasgd.fleet.providers.local.processes import Process, kill_all, processes_of
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.stack import StackHome, StackState
from vcasgd.stack.layout import kind_of, replica_of, service_of
from vcasgd.stack.parts import mark
from vcasgd.store.connection import connect
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.sentinel import named_primary

T = TypeVar("T")

#: how long a fault may wait for something to hit, and may take to show
FIRE_SECONDS = 300.0
#: a worker whose last heartbeat is older is not at work
FRESH_HEARTBEATS = 4
POLL_SECONDS = 0.05


class Target(StrEnum):
    """What the audit kills. ``worker-notice`` is an eviction that is announced; ``failover``
    the primary of a server that has a replica, which must then be promoted."""

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
    """A fault that fired. ``recovered`` tells whether everything is as good as before."""

    target: Target
    victim: str
    at: float
    recovered: Callable[[], bool]


class Killer:
    """Kills parts of a stack and machines of its local pool.

    Every method returns only after the victim is dead, and raises :class:`StackError` where
    it could not be killed: a fault that did not fire proves nothing.
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
        """``services``: URLs of the servers that have a replica, by name."""
        self._home = home
        self._provider = provider
        self._jobs = jobs
        self._job = job
        self._services = services
        self._fresh_seconds = FRESH_HEARTBEATS * heartbeat

    def fire(self, target: Target, rng: random.Random) -> Fault:
        match target:
            case Target.WORKER:
                return self._take_worker(target, rng)
            case Target.WORKER_NOTICE:
                return self._take_worker(target, rng)
            case Target.FAILOVER:
                return self._fail_over(target, rng)
            case _:
                return self._kill_part(target, rng)

    # -- parts of the stack -------------------------------------------------------------------

    def _kill_part(self, target: Target, rng: random.Random) -> Fault:
        """A part's own process and all of its helpers, as when its machine is switched off."""
        parts = StackState.read(self._home.path).parts
        name = rng.choice(sorted(name for name in parts if kind_of(name) == target))
        self._await_whole(name)
        return self._kill_named(target, name)

    def _kill_named(self, target: Target, name: str) -> Fault:
        process = _await(lambda: self._part_process(name), f"{name} to kill")
        at = time.time()
        if not kill_all(mark(self._home, name), process) or process.alive():
            raise StackError(f"{name} could not be killed")
        return Fault(target, f"{name} {process.pid}", at, lambda: self._part_is_back(name, process))

    def _fail_over(self, target: Target, rng: random.Random) -> Fault:
        """The primary dies, and is not started again before its replica was promoted."""
        service = rng.choice(sorted(self._services))
        self._await_whole(service)
        state, before = StackState.read(self._home.path), self._primary(service)
        name = next(each for each in (service, replica_of(service)) if state.ports[each] == before)
        fault = self._kill_named(target, name)
        _await(lambda: self._primary(service) not in (None, before), f"new primary of {service}")
        return fault

    def _primary(self, service: str) -> int | None:
        found = named_primary(self._services[service])
        return found[1] if found else None

    def _await_whole(self, name: str) -> None:
        """Until a server has its replica, if it is to have one: of two only one may die."""
        url = self._services.get(service_of(name))
        if url is None:
            return
        client = connect(url)

        def is_whole() -> bool:
            try:
                return "online" in client.info("replication").get("slave0", {}).get("state", "")
            except StoreError:
                return False

        _await(is_whole, f"replica of {name}")
        client.close()

    def _part_process(self, name: str) -> Process | None:
        part = StackState.read(self._home.path).parts[name]
        process = part.process
        return process if process is not None and part.ready and process.alive() else None

    def _part_is_back(self, name: str, old: Process) -> bool:
        process = self._part_process(name)
        return process is not None and process != old

    # -- machines -------------------------------------------------------------------------------

    def _take_worker(self, target: Target, rng: random.Random) -> Fault:
        """A machine whose worker is training now."""
        busy = _await(self._busy_machines, "machine with a worker at work")
        victim = rng.choice(sorted(busy, key=lambda one: one.id))
        crew = processes_of(victim.id, None)
        at, workers = time.time(), len(busy)
        if target is Target.WORKER:
            self._provider.kill(victim.id)
        else:
            self._provider.evict(victim.id, rng.uniform(1.0, 4.0))
        _await(lambda: self._is_gone(victim.id), f"end of {victim.id}")
        if any(process.alive() for process in crew):
            raise StackError(f"parts of {victim.id} are still alive")
        return Fault(target, victim.id, at, lambda: len(self._busy_machines()) >= workers)

    def _is_gone(self, instance: str) -> bool:
        present = {one.id for one in self._provider.instances()}
        return instance not in present and not processes_of(instance, None)

    def _busy_machines(self) -> list[Instance]:
        try:
            beats = self._jobs.workers(self._job).values()
        except StoreError:
            return []
        fresh = time.time() - self._fresh_seconds
        at_work = {beat.instance for beat in beats if (beat.at or 0.0) > fresh and beat.steps}
        return [
            one
            for one in self._provider.instances()
            if one.id in at_work and one.state is InstanceState.RUNNING
        ]


def audit_task() -> Path:
    """The working directory of the task that counts."""
    return Path(__file__).parent / "task"


def _await(look: Callable[[], T | None], what: str) -> T:
    """The first result that is not empty; a fault that finds no victim is an error."""
    deadline = time.monotonic() + FIRE_SECONDS
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise StackError(f"the fault did not fire: no {what} within {FIRE_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
