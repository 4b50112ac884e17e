"""Removal of a stack's remaining processes, machines and temporary files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable

from vcasgd.errors import FleetError, SpecError, StackError, StoreError, VcasgdError
from vcasgd.fleet.pools import LocalPoolSpec, load_pools
from vcasgd.fleet.providers.base import Provider
from vcasgd.fleet.providers.local.processes import kill_all
from vcasgd.fleet.providers.local.provider import LocalPool, LocalProvider
from vcasgd.fleet.providers.registry import configured_pools, make_providers
from vcasgd.settings import Settings
from vcasgd.stack.home import StackHome
from vcasgd.stack.layout import kind_of
from vcasgd.stack.parts import PARTS, mark
from vcasgd.stack.probes import PROBE_SECONDS
from vcasgd.stack.state import PartState, StackState
from vcasgd.store.connection import connect
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control

log = logging.getLogger(__name__)


def kill_remaining(home: StackHome, state: StackState) -> None:
    """Kill all remaining processes of the parts. Raises :class:`StackError` on failure."""
    for name in dict.fromkeys((*PARTS, *state.parts)):
        part = state.parts.get(name, PartState())
        if not kill_all(mark(home, name), part.process):
            raise StackError(f"can't kill the processes of {name} that an earlier stack left")


def destroy_instances(home: StackHome, settings: Settings, parts: Iterable[str]) -> None:
    """Terminate all machines, which would cost money without a stack.

    Cloud machines are terminated only if the controller is one of the ``parts``; otherwise they
    belong to another stack. Failures are logged.
    """
    for pool in local_pools(settings):
        provider = LocalProvider(home.path, settings.cluster, LocalPool(pool, capacity=1))
        try:
            provider.destroy_all()
        except FleetError as error:
            log.error("%s", error)
    if _owns_fleet(parts):
        for other in _cloud_providers(settings):
            _terminate_all(other)


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


def _cloud_providers(settings: Settings) -> list[Provider]:
    """Return the cloud providers of the pools file."""
    try:
        pools = [pool for pool in configured_pools(settings) if not isinstance(pool, LocalPoolSpec)]
        return list(dict.fromkeys(make_providers(settings, pools).values()))
    except VcasgdError as error:
        log.error("cloud machines may still run: %s", error)
        return []


def _terminate_all(provider: Provider) -> None:
    try:
        machines = [one.id for one in provider.instances()]
        for start in range(0, len(machines), provider.most_terminated):
            some = machines[start : start + provider.most_terminated]
            log.info("terminate %s", ", ".join(some))
            provider.terminate(*some)
    except FleetError as error:
        log.error("machines of %s may still run: %s", provider.name, error)
    finally:
        provider.close()


def remove_instances(ledger_url: str, settings: Settings, parts: Iterable[str]) -> None:
    """Remove the terminated machines from the ledger.

    The next controller would otherwise count them as lost.
    """
    pools = None if _owns_fleet(parts) else local_pools(settings)
    ledger = connect(ledger_url, answer_seconds=PROBE_SECONDS)
    try:
        busy = _remove(Control(ledger), pools)
        jobs = Jobs(ledger)
        for job in busy.intersection(jobs.active()):
            jobs.event(job, "stack-stopped", "the stack and its machines were stopped")
    except StoreError as error:
        log.warning("ledger: %s", error)


def _remove(control: Control, pools: list[str] | None) -> set[str]:
    """Remove the machines of the pools, or all, and return the jobs that they worked for."""
    rows = control.instances()
    removed = {n: row for n, row in rows.items() if pools is None or row.get("pool") in pools}
    control.publish(
        {name: row for name, row in rows.items() if name not in removed}, control.pools()
    )
    return {str(row.get("job")) for row in removed.values()}


def remove_scratch(state: StackState) -> None:
    """Remove the folder with sockets and temporary files."""
    if state.scratch:
        shutil.rmtree(state.scratch, ignore_errors=True)
