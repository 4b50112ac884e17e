"""What the fleet loop consists of, so that its halves share it."""

from __future__ import annotations

from dataclasses import dataclass

from vcasgd.fleet.observed import Limits
from vcasgd.runtime.chronicle import Chronicle
from vcasgd.runtime.controller.bookkeeping import Books
from vcasgd.runtime.controller.guard import Guard
from vcasgd.runtime.controller.listing import Listing
from vcasgd.runtime.controller.memory import Memory
from vcasgd.runtime.controller.providers import Estate
from vcasgd.runtime.controller.speeds import Speeds
from vcasgd.runtime.controller.timeline import Timeline
from vcasgd.runtime.crashes import Crashes
from vcasgd.settings import Settings
from vcasgd.store.connection import Client
from vcasgd.store.jobs import Jobs
from vcasgd.store.servers import Control

#: a worker that was asked to leave is killed after so many lease times
DRAIN_LEASES = 2.0
#: AWS and GCP bill by the second, and a minute at least
BILLING_SECONDS = 60.0
#: from the request to end a machine until its cloud charges no more
TERMINATE_SECONDS = 10.0


@dataclass(frozen=True)
class Parts:
    """Of one controller."""

    settings: Settings
    ledger: Client
    estate: Estate
    jobs: Jobs
    control: Control
    listing: Listing
    memory: Memory
    books: Books
    guard: Guard
    speeds: Speeds
    crashes: Crashes
    chronicle: Chronicle
    timeline: Timeline

    @classmethod
    def over(cls, settings: Settings, ledger: Client, estate: Estate) -> Parts:
        """Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        jobs, control = Jobs(ledger), Control(ledger)
        return cls(
            settings=settings,
            ledger=ledger,
            estate=estate,
            jobs=jobs,
            control=control,
            listing=Listing(estate),
            memory=Memory(control),
            books=Books(ledger),
            guard=Guard(settings, ledger),
            speeds=Speeds(ledger),
            crashes=Crashes(jobs),
            chronicle=Chronicle(control, jobs),
            timeline=Timeline(ledger),
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
