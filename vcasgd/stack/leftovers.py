"""What a stack has beside its parts' own processes, and how it is cleared away."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable

from vcasgd.errors import FleetError, StackError, StoreError, VcasgdError
from vcasgd.fleet.pools import LOCAL_POOL as POOL
from vcasgd.fleet.providers.base import Provider
from vcasgd.fleet.providers.local import LocalPool, LocalProvider
from vcasgd.fleet.providers.local_processes import kill_all
from vcasgd.fleet.providers.registry import configured_pools, make_providers
from vcasgd.settings import Settings
from vcasgd.stack.home import StackHome
from vcasgd.stack.names import kind_of
from vcasgd.stack.parts import PARTS, mark
from vcasgd.stack.probes import PROBE_SECONDS
from vcasgd.stack.state import PartState, StackState
from vcasgd.store.connection import connect
from vcasgd.store.jobs import Jobs
from vcasgd.store.servers import Control

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
    clouds = any(kind_of(name) == "controller" for name in parts)
    for provider in _providers(home, settings, clouds=clouds):
        try:
            _destroy(provider)
        except FleetError as error:
            log.error("machines of %s may still run: %s", provider.name, error)
        finally:
            provider.close()


def _providers(home: StackHome, settings: Settings, *, clouds: bool) -> list[Provider]:
    local = LocalProvider(home.path, settings.cluster, LocalPool(POOL, capacity=1))
    try:
        return [local, *(_elsewhere(settings) if clouds else ())]
    except VcasgdError as error:
        log.error("machines of other pools than %s may still run: %s", POOL, error)
        return [local]


def _elsewhere(settings: Settings) -> list[Provider]:
    """Of the pools file, each once. Raises :class:`~vcasgd.errors.VcasgdError`."""
    made = make_providers(settings, configured_pools(settings))
    return list(dict.fromkeys(provider for name, provider in made.items() if name != POOL))


def _destroy(provider: Provider) -> None:
    if isinstance(provider, LocalProvider):
        provider.destroy_all()
        return
    for one in provider.instances():
        log.info("terminate %s", one.id)
        provider.terminate(one.id)


def forget_instances(ledger_url: str) -> None:
    """Machines that we ended ourselves are no loss: the next controller shall not count them."""
    ledger = connect(ledger_url, answer_seconds=PROBE_SECONDS)
    try:
        busy = _forget(Control(ledger))
        jobs = Jobs(ledger)
        for job in busy.intersection(jobs.active()):
            jobs.event(job, "stack-stopped", "the stack is stopped, and with it its machines")
    except StoreError as error:
        log.warning("ledger: %s", error)


def _forget(control: Control) -> set[str]:
    """The jobs that they worked for."""
    rows = control.instances()
    control.show({}, control.pools())
    return {str(row.get("job")) for row in rows.values()}


def remove_scratch(state: StackState) -> None:
    """What only living processes need."""
    if state.scratch:
        shutil.rmtree(state.scratch, ignore_errors=True)
