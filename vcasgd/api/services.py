"""What routes need, as a dependency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from vcasgd.api.curves import Curves
from vcasgd.api.sessions import Sessions
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Costs, Workloads
from vcasgd.store.ledger.events import EventFeed
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control, Servers


@dataclass(frozen=True)
class Services:
    """The store and the storage behind the API."""

    settings: Settings
    ledger: RedisClient
    storage: Storage
    jobs: Jobs
    control: Control
    servers: Servers
    costs: Costs
    workloads: Workloads
    everything: EventFeed
    sessions: Sessions
    curves: Curves

    @classmethod
    def over(
        cls, settings: Settings, ledger: RedisClient, storage: Storage, sessions: Sessions
    ) -> Services:
        return cls(
            settings=settings,
            ledger=ledger,
            storage=storage,
            jobs=Jobs(ledger),
            control=Control(ledger),
            servers=Servers(ledger),
            costs=Costs(ledger),
            workloads=Workloads(ledger),
            everything=EventFeed(ledger),
            sessions=sessions,
            curves=Curves(ledger),
        )


async def _of_app(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Here = Annotated[Services, Depends(_of_app)]
