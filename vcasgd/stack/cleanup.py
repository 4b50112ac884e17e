"""Removal of a stack's remaining processes, machines and temporary files."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vcasgd.controller.fleet.machine_timeline import TimelineRecorder
from vcasgd.controller.fleet.pools import USED_POOLS, used_pools
from vcasgd.errors import FleetError, SpecError, StackError, StoreError, VcasgdError
from vcasgd.fleet.pools import FREE_PROVIDERS, LocalPoolSpec, PoolSpec, load_pools, pool_row
from vcasgd.fleet.providers.base import Provider
from vcasgd.fleet.providers.local.processes import kill_all
from vcasgd.fleet.providers.local.provider import LocalProvider
from vcasgd.fleet.providers.registry import configured_pools, make_reachable
from vcasgd.schemas.fleet import MachineState
from vcasgd.settings import Settings
from vcasgd.stack.home import PartState, StackHome, StackState
from vcasgd.stack.layout import kind_of
from vcasgd.stack.parts import PARTS, PROBE_SECONDS, mark
from vcasgd.steady_time import steady_time
from vcasgd.store.connection import check_server, connect
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.worker_names import machine_of

log = logging.getLogger(__name__)

#: Seconds between two looks at the machines of a cloud. One that was launched just before is listed
#: some seconds late.
LOOK_SECONDS = 5.0
#: Looks in a row in which a provider must list no machine.
QUIET_LOOKS = 2
#: Seconds after which machines that are still listed are reported as such.
END_SECONDS = 120.0


def kill_remaining(home: StackHome, state: StackState) -> None:
    """Kill all remaining processes of the parts. Raises :class:`StackError` on failure."""
    for name in dict.fromkeys((*PARTS, *state.parts)):
        part = state.parts.get(name, PartState())
        if not kill_all(mark(home, name), part.process):
            raise StackError(f"can't kill the processes of {name} that an earlier stack left")


@dataclass(frozen=True)
class KnownMachines:
    """Pools of the machines in the ledger, and these pools as they were in the pools file.

    The file may lack some of the pools now. ``cluster``: that of the machines, unless it is the one
    in the settings.
    """

    pools: Mapping[str, Any] = field(default_factory=dict)
    machines: Mapping[str, str] = field(default_factory=dict)
    cluster: str | None = None

    @classmethod
    def without_ledger(
        cls, home: StackHome, machines: Mapping[str, str] | None = None
    ) -> KnownMachines:
        """Return what the controller wrote into the home."""
        cluster, pools = used_pools(home.path)
        return cls(pools, machines or {}, cluster)

    @classmethod
    def read(cls, home: StackHome, ledger_url: str) -> KnownMachines:
        """Read them from the ledger, or from the home if it doesn't answer or isn't supported."""
        ledger = connect(ledger_url, answer_seconds=PROBE_SECONDS)
        control = Control(ledger)
        try:
            check_server(ledger, "ledger")
            rows = control.machines()
            return cls(control.pool_specs(), {name: row["pool"] for name, row in rows.items()})
        except StoreError as error:
            log.warning("ledger: %s", error)
            return cls.without_ledger(home)

    def of(self, pools: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name, pool in self.machines.items() if pool in pools)


@dataclass(frozen=True)
class Unended:
    """Machines that may still run, of some pools or of a provider, and why that is not known."""

    where: str
    machines: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        names = f" ({', '.join(self.machines)})" if self.machines else ""
        return f"machines of {self.where}{names} may still run and cost money: {self.why}"


def destroy_machines(
    home: StackHome,
    settings: Settings,
    parts: Iterable[str],
    *,
    known: KnownMachines = KnownMachines(),
    progress: Callable[[str], None] = log.info,
    give_up: Callable[[], bool] = lambda: False,
    look_seconds: float = LOOK_SECONDS,
) -> list[Unended]:
    """End all machines, which would cost money without a stack. Return those that may still run.

    Cloud machines are ended only if the controller is one of the ``parts``; otherwise they belong
    to another stack. A provider must list no machine several times in a row, because a launch can
    be under way.
    """
    unended = []
    if known.cluster is not None:
        settings = settings.model_copy(update={"cluster": known.cluster})
    for pool in local_pools(settings):
        provider = LocalProvider(
            home.path, settings.cluster, LocalPoolSpec(name=pool, provider="local", max_machines=1)
        )
        try:
            provider.destroy_all()
        except FleetError as error:
            unended.append(Unended(pool, (), str(error)))
    if _owns_fleet(parts):
        endings, unreachable = _endings(settings, known)
        unended += unreachable
        unended += _end_all(endings, progress, give_up, look_seconds)
        if not unended:
            (home.path / USED_POOLS).unlink(missing_ok=True)
    for each in unended:
        log.error("%s", each)
    return unended


def local_pools(settings: Settings) -> list[str]:
    """Return the names of the pools whose machines are processes of this computer.

    Machines of a pool that has been removed from the file exit by themselves.
    """
    try:
        pools = load_pools(settings.pools)
    except SpecError as error:
        log.error("%s", error)
        pools = load_pools(None)
    return [pool.name for pool in pools if isinstance(pool, LocalPoolSpec)]


def _owns_fleet(parts: Iterable[str]) -> bool:
    return any(kind_of(name) == "controller" for name in parts)


def _endings(settings: Settings, known: KnownMachines) -> tuple[list[_Ending], list[Unended]]:
    """Return the cloud providers of all pools, and the pools whose provider can't be reached."""
    unended: list[Unended] = []
    pools: defaultdict[Provider[Any], set[str]] = defaultdict(set)
    specs: dict[str, PoolSpec] = {}
    try:
        specs = {pool.name: pool for pool in configured_pools(settings)}
    except VcasgdError as error:
        unended.append(Unended("the pools file", (), str(error)))
    made, problems = make_reachable(settings, _clouds({n: pool_row(s) for n, s in specs.items()}))
    # A pool may have moved since it got its machines.
    present = [(specs[name], provider) for name, provider in made.items()]
    before, more = make_reachable(settings, _clouds(known.pools), known=present)
    for name, why in {**problems, **more}.items():
        unended.append(Unended(f"pool {name}", known.of({name}), why))
    for name, provider in (*made.items(), *before.items()):
        pools[provider].add(name)
    return [_Ending(provider, known.of(names)) for provider, names in pools.items()], unended


def _clouds(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row for name, row in rows.items() if row.get("provider") not in FREE_PROVIDERS}


class _Ending:
    """The end of all machines of one provider."""

    def __init__(self, provider: Provider[Any], known: Iterable[str]) -> None:
        self.provider = provider
        self._asked: set[str] = set()
        #: Machines of calls that the provider will always refuse.
        self._refused: set[str] = set()
        self._left = list(known)
        self._quiet = 0
        self._why: str | None = None
        self._useless = False

    @property
    def over(self) -> bool:
        """True if all machines have ended, or if another look is useless."""
        return self._useless or self._quiet >= QUIET_LOOKS

    @property
    def unended(self) -> Unended | None:
        """Machines that may still run."""
        if self._quiet >= QUIET_LOOKS and not self._left:
            return None
        return Unended(self.provider.name, tuple(self._left), self._why or "they are still listed")

    def look(self, progress: Callable[[str], None]) -> None:
        """List the machines, and end those that appeared."""
        before, self._quiet = self._quiet, 0
        try:
            machines = self.provider.machines()
            # One that leaves after it was asked to is at its end.
            self._left = [
                one.id
                for one in machines
                if one.state is not MachineState.LEAVING or one.id not in self._asked
            ]
            some = [one for one in self._left if one not in self._refused]
            if not some:
                self._quiet = before + 1
                return
            if not self._refused:
                self._why = None
            progress(f"{self.provider.name}: ending {', '.join(some)}")
            for start in range(0, len(some), self.provider.max_terminated):
                self._end(some[start : start + self.provider.max_terminated])
        except FleetError as error:
            self._why, self._useless = str(error), not error.retryable

    def _end(self, machines: Sequence[str]) -> None:
        """End machines in one call. One that can't be ended keeps no other one alive."""
        try:
            self.provider.terminate(*machines)
        except FleetError as error:
            self._why = str(error)
            if error.retryable:
                return
            # The next look shows which of them stay.
            self._refused.update(machines)
        self._asked.update(machines)


def _end_all(
    endings: Sequence[_Ending],
    progress: Callable[[str], None],
    give_up: Callable[[], bool],
    look_seconds: float,
) -> list[Unended]:
    deadline = time.monotonic() + END_SECONDS
    while True:
        for ending in endings:
            if not ending.over:
                ending.look(progress)
        over = all(ending.over for ending in endings)
        if over or give_up() or time.monotonic() + look_seconds > deadline:
            break
        time.sleep(look_seconds)
    for ending in endings:
        ending.provider.close()
    return [each for ending in endings if (each := ending.unended)]


def remove_machines(
    ledger_url: str, settings: Settings, parts: Iterable[str], unended: Collection[Unended]
) -> None:
    """Remove the machines that were ended from the ledger.

    The next controller would otherwise count them as lost. It ends those of ``unended``.
    """
    pools = None if _owns_fleet(parts) else local_pools(settings)
    left = {name for each in unended for name in each.machines}
    ledger = connect(ledger_url, answer_seconds=PROBE_SECONDS)
    control = Control(ledger)
    try:
        removed = _remove(control, pools, left)
        if pools is None and not unended and (specs := control.pool_specs()):
            # They have no machines, so they may move.
            control.forget_pool_specs(specs)
        jobs = Jobs(ledger)
        active = {job: removed[job] for job in removed.keys() & set(jobs.active())}
        # The view may not know yet, or no longer, which job a machine works for.
        gone = {machine for machines in removed.values() for machine in machines}
        workers = {
            job: {name for name in names if machine_of(name) in gone}
            for job, names in jobs.workers.names_of(jobs.active()).items()
        }
        jobs.workers.remove_all(workers)
        TimelineRecorder(ledger).end(active, "the stack was stopped", steady_time())
        for job in active:
            jobs.event(job, "stack-stopped", "the stack and its machines were stopped")
    except StoreError as error:
        log.warning("ledger: %s", error)


def _remove(
    control: Control, pools: list[str] | None, left: Collection[str]
) -> dict[str, set[str]]:
    """Remove the machines of the pools, or all, and return them by the job they worked for."""
    rows = control.machines()
    removed = {
        name: row
        for name, row in rows.items()
        if name not in left and (pools is None or row.get("pool") in pools)
    }
    control.update({}, removed, None)
    of_job: defaultdict[str, set[str]] = defaultdict(set)
    for name, row in removed.items():
        of_job[str(row.get("job"))].add(name)
    return dict(of_job)
