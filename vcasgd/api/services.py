"""Services of the routes: settings, storage, and the parts of the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

from fastapi import Depends, Request

from vcasgd.api.callers import Callers
from vcasgd.api.history import Curves
from vcasgd.api.platform import Platform
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.api_tokens import ApiTokens
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.costs import Costs, Workloads
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.ledger.servers import Servers
from vcasgd.store.ledger.workers import WorkerBeats


@dataclass(frozen=True)
class Services:
    """Objects that all requests share."""

    settings: Settings
    ledger: RedisClient
    storage: Storage
    callers: Callers
    tokens: ApiTokens
    jobs: Jobs
    control: Control
    servers: Servers
    beats: WorkerBeats
    joined: JoinedMachines
    costs: Costs
    workloads: Workloads
    curves: Curves
    platform: Platform

    @classmethod
    def of(cls, settings: Settings, ledger: RedisClient, storage: Storage, token: str) -> Self:
        """Create the services without connecting to anything. ``token``: the stack's own."""
        tokens = ApiTokens(ledger)
        return cls(
            settings,
            ledger,
            storage,
            Callers(token, tokens),
            tokens,
            Jobs(ledger),
            Control(ledger),
            Servers(ledger),
            WorkerBeats(ledger),
            JoinedMachines(ledger, settings.lease_seconds),
            Costs(ledger),
            Workloads(ledger),
            Curves(ledger),
            Platform(ledger),
        )


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(_services)]


def _job(services: ServicesDep, job: str) -> JobRecord:
    """Return a job. Raises :class:`~vcasgd.errors.NotFound`."""
    return services.jobs.get(job)


#: The job in the path of a route.
JobDep = Annotated[JobRecord, Depends(_job)]
