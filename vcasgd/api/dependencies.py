"""Dependencies of the routes: settings, storage, and the parts of the store that they use."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request

from vcasgd.api.callers import Callers
from vcasgd.api.platform import Platform
from vcasgd.api.series import Curves
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.api_tokens import ApiTokens
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.costs import Costs, Workloads
from vcasgd.store.ledger.events import EventFeed
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.ledger.servers import Servers
from vcasgd.store.ledger.workers import WorkerBeats

Service = TypeVar("Service")


def provide(
    app: FastAPI, settings: Settings, ledger: RedisClient, storage: Storage, callers: Callers
) -> None:
    """Create the services that the routes of ``app`` depend on."""
    jobs, control, servers = Jobs(ledger), Control(ledger), Servers(ledger)
    costs = Costs(ledger)
    app.state.services = {
        Settings: settings,
        RedisClient: ledger,
        Storage: storage,
        Callers: callers,
        ApiTokens: ApiTokens(ledger),
        Jobs: jobs,
        Control: control,
        Servers: servers,
        WorkerBeats: WorkerBeats(ledger),
        JoinedMachines: JoinedMachines(ledger, settings.lease_seconds),
        Costs: costs,
        Workloads: Workloads(ledger),
        Curves: Curves(ledger),
        Platform: Platform(jobs, control, servers, costs, EventFeed(ledger), ledger),
    }


def _service(kind: type[Service]) -> Any:
    async def service(request: Request) -> Service:
        found: Service = request.app.state.services[kind]
        return found

    return Depends(service)


SettingsDep = Annotated[Settings, _service(Settings)]
LedgerDep = Annotated[RedisClient, _service(RedisClient)]
StorageDep = Annotated[Storage, _service(Storage)]
CallersDep = Annotated[Callers, _service(Callers)]
ApiTokensDep = Annotated[ApiTokens, _service(ApiTokens)]
JobsDep = Annotated[Jobs, _service(Jobs)]
ControlDep = Annotated[Control, _service(Control)]
ServersDep = Annotated[Servers, _service(Servers)]
WorkerBeatsDep = Annotated[WorkerBeats, _service(WorkerBeats)]
JoinedMachinesDep = Annotated[JoinedMachines, _service(JoinedMachines)]
CostsDep = Annotated[Costs, _service(Costs)]
WorkloadsDep = Annotated[Workloads, _service(Workloads)]
CurvesDep = Annotated[Curves, _service(Curves)]
PlatformDep = Annotated[Platform, _service(Platform)]
