"""What a stack has beside its parts' own processes, and how it is cleared away."""

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
from vcasgd.stack.names import kind_of
from vcasgd.stack.parts import PARTS, mark
from vcasgd.stack.probes import PROBE_SECONDS
from vcasgd.stack.state import PartState, StackState
from vcasgd.store.connection import connect
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control

log = logging.getLogger(__name__)


def sweep(home: StackHome, state: StackState) -> None:
    """Kills what is left of the parts. Raises :class:`StackError` if that is not possible."""
    for name in dict.fromkeys((*PARTS, *state.parts)):
        part = state.parts.get(name, PartState())
        if not kill_all(mark(home, name), part.process):
            raise StackError(f"processes of {name} of an earlier life can't be killed")


def destroy_instances(home: StackHome, settings: Settings, parts: Iterable[str]) -> None:
    """Ends the machines: without a stack they only cost money.

    Those in clouds too, if the controller is among the ``parts`` of this stack: else they belong
    to another one. What can't be ended is logged.
    """
    for pool in local_pools(settings):
        provider = LocalProvider(home.path, settings.cluster, LocalPool(pool, capacity=1))
        try:
            provider.destroy_all()
        except FleetError as error:
            log.error("%s", error)
    if _keeps_fleet(parts):
        for other in _elsewhere(settings):
            _terminate_all(other)


def local_pools(settings: Settings) -> list[str]:
    """Of machines that are processes of this computer. Those of a pool that is in no file any
    more notice by themselves that they have no owner."""
    try:
        pools = load_pools(settings.pools)
    except SpecError as error:
        log.error("%s", error)
        pools = load_pools(None)
    return [pool.name for pool in pools if isinstance(pool, LocalPoolSpec)]


def _keeps_fleet(parts: Iterable[str]) -> bool:
    return any(kind_of(name) == "controller" for name in parts)


def _elsewhere(settings: Settings) -> list[Provider]:
    """The clouds of the pools file, each once."""
    try:
        pools = [pool for pool in configured_pools(settings) if not isinstance(pool, LocalPoolSpec)]
        return list(dict.fromkeys(make_providers(settings, pools).values()))
    except VcasgdError as error:
        log.error("machines in clouds may still run: %s", error)
        return []


def _terminate_all(provider: Provider) -> None:
    try:
        for one in provider.instances():
            log.info("terminate %s", one.id)
            provider.terminate(one.id)
    except FleetError as error:
        log.error("machines of %s may still run: %s", provider.name, error)
    finally:
        provider.close()


def forget_instances(ledger_url: str, settings: Settings, parts: Iterable[str]) -> None:
    """Machines that we ended ourselves are no loss: the next controller shall not count them."""
    ended = None if _keeps_fleet(parts) else local_pools(settings)
    ledger = connect(ledger_url, answer_seconds=PROBE_SECONDS)
    try:
        busy = _forget(Control(ledger), ended)
        jobs = Jobs(ledger)
        for job in busy.intersection(jobs.active()):
            jobs.event(job, "stack-stopped", "the stack is stopped, and with it its machines")
    except StoreError as error:
        log.warning("ledger: %s", error)


def _forget(control: Control, pools: list[str] | None) -> set[str]:
    """Those of the pools, or all; the jobs that they worked for."""
    rows = control.instances()
    ours = {n: row for n, row in rows.items() if pools is None or row.get("pool") in pools}
    control.show({name: row for name, row in rows.items() if name not in ours}, control.pools())
    return {str(row.get("job")) for row in ours.values()}


def remove_scratch(state: StackState) -> None:
    """What only living processes need."""
    if state.scratch:
        shutil.rmtree(state.scratch, ignore_errors=True)
