"""What routes need, as a dependency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from vcasgd.runtime.storage import Storage
from vcasgd.settings import Settings
from vcasgd.store.connection import Client
from vcasgd.store.jobs import Jobs
from vcasgd.store.servers import Control, Servers


@dataclass(frozen=True)
class Services:
    """The store and the storage behind the API."""

    settings: Settings
    ledger: Client
    storage: Storage
    jobs: Jobs
    control: Control
    servers: Servers

    @classmethod
    def over(cls, settings: Settings, ledger: Client, storage: Storage) -> Services:
        jobs, control, servers = Jobs(ledger), Control(ledger), Servers(ledger)
        return cls(settings, ledger, storage, jobs, control, servers)


async def _of_app(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Here = Annotated[Services, Depends(_of_app)]
