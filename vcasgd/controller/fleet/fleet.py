"""The parts of a fleet that the steps of its rounds share."""

from __future__ import annotations

from collections.abc import Callable

from vcasgd.cluster.driver import Cluster
from vcasgd.controller.fleet.cloud_cache import CloudCache
from vcasgd.controller.fleet.cloud_calls import CloudCalls, LaunchHistory
from vcasgd.controller.fleet.costs import CostLedger, Speeds
from vcasgd.controller.fleet.demands import ClearancePolicy
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.controller.fleet.workplaces import Workplaces
from vcasgd.schemas.fleet import Machine
from vcasgd.settings import Settings
from vcasgd.steady_time import steady_time
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.workers import WorkerBeats


class Fleet:
    """Settings, tables of the ledger, clouds, and machines of one controller.

    ``connect`` returns a connection to Ray, or None while no pool needs one. ``leads`` is False
    when another controller may act. ``clock`` returns Unix seconds. Raises
    :class:`~vcasgd.errors.StoreUnavailable` while the ledger is unavailable.
    """

    def __init__(
        self,
        settings: Settings,
        ledger: RedisClient,
        pools: PoolRegistry,
        beats: WorkerBeats,
        connect: Callable[[], Cluster | None],
        leads: Callable[[], bool],
        clock: Callable[[], float] = steady_time,
    ) -> None:
        self.settings, self.ledger, self.pools, self.beats = settings, ledger, pools, beats
        self.leads, self.clock = leads, clock
        self.jobs, self.control = Jobs(ledger), Control(ledger)
        self.ledger_id = self.control.ledger_id()
        #: Machines as they were last published, perhaps by an earlier controller.
        self.published = {
            name: Machine.model_validate(row) for name, row in self.control.machines().items()
        }
        #: Why machines are ended, also by an earlier controller: their end counts as no loss.
        self.terminated = {
            name: one.ending for name, one in self.published.items() if one.ending is not None
        }
        self.calls = CloudCalls(leads)
        self.cloud = CloudCache(pools, self.calls, self.published.values(), clock)
        self.costs, self.speeds = CostLedger(ledger), Speeds(ledger)
        self.launches = LaunchHistory(self.control)
        self.clearance = ClearancePolicy(settings, ledger)
        self.workplaces = Workplaces(connect, settings, ledger, clock)
