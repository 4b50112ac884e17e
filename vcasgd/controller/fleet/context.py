"""What the fleet loop consists of, so that its halves share it."""

from __future__ import annotations

from dataclasses import dataclass

from vcasgd.controller.fleet.clearance import ClearancePolicy
from vcasgd.controller.fleet.cloud_cache import CloudCache
from vcasgd.controller.fleet.costs import CostLedger
from vcasgd.controller.fleet.events import FleetEvents
from vcasgd.controller.fleet.launch_history import LaunchHistory
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.controller.fleet.restart_backoff import RestartBackoff
from vcasgd.controller.fleet.speeds import Speeds
from vcasgd.controller.fleet.timeline import TimelineRecorder
from vcasgd.fleet.observed import Limits
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control

#: a worker that was asked to leave is killed after so many lease times
DRAIN_LEASES = 2.0
#: AWS and GCP bill by the second, and a minute at least
BILLING_SECONDS = 60.0
#: from the request to end a machine until its cloud charges no more
TERMINATE_SECONDS = 10.0


@dataclass(frozen=True)
class ControllerContext:
    """Of one controller."""

    settings: Settings
    ledger: RedisClient
    estate: PoolRegistry
    jobs: Jobs
    control: Control
    listing: CloudCache
    memory: LaunchHistory
    books: CostLedger
    guard: ClearancePolicy
    speeds: Speeds
    crashes: RestartBackoff
    chronicle: FleetEvents
    timeline: TimelineRecorder

    @classmethod
    def over(
        cls, settings: Settings, ledger: RedisClient, estate: PoolRegistry
    ) -> ControllerContext:
        """Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        jobs, control = Jobs(ledger), Control(ledger)
        return cls(
            settings=settings,
            ledger=ledger,
            estate=estate,
            jobs=jobs,
            control=control,
            listing=CloudCache(estate),
            memory=LaunchHistory(control),
            books=CostLedger(ledger),
            guard=ClearancePolicy(settings, ledger),
            speeds=Speeds(ledger),
            crashes=RestartBackoff(jobs),
            chronicle=FleetEvents(control, jobs),
            timeline=TimelineRecorder(ledger),
        )

    @property
    def limits(self) -> Limits:
        """A machine that is given up is noticed in the next round, its worker may drain, and then
        its cloud takes a moment."""
        drain = DRAIN_LEASES * self.settings.lease_seconds
        clouds = any(pool.provider != "local" for pool in self.estate.pools.values())
        return Limits(
            idle_seconds=self.settings.idle_seconds,
            exit_seconds=self.settings.heartbeat + drain + TERMINATE_SECONDS,
            billing_seconds=BILLING_SECONDS if clouds else 0.0,
        )
