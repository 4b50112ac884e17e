"""Which pools may see which jobs: what is told to the ledger, to the plan, and to people."""

from __future__ import annotations

from vcasgd.fleet.pools import PoolSpec
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.store.admission import worker_lease_pass
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.clearance import Clearances
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs


def missing_labels(spec: JobSpec, pool: PoolSpec) -> list[str]:
    """Labels of the job that the pool may not see, in order."""
    return [label for label in spec.required_labels if label not in pool.labels]


class ClearancePolicy:
    """Nothing of a job is placed where it may not be; the ledger refuses it a second time."""

    def __init__(self, settings: Settings, ledger: RedisClient) -> None:
        self._settings = settings
        self._jobs = Jobs(ledger)
        self._clearances = Clearances(ledger)
        self._told: dict[str, frozenset[str]] | None = None
        self._pools: dict[str, PoolSpec] = {}

    def know(self, pools: dict[str, PoolSpec]) -> None:
        """As the file says now; the ledger hears of it before anything else happens."""
        allowed = {name: frozenset(pool.labels) for name, pool in pools.items()}
        if allowed != self._told:
            self._clearances.allow(allowed)
            self._told = allowed
        self._pools = pools

    def divide(self, job: JobRecord) -> tuple[tuple[str, ...], frozenset[str]]:
        """The job's pools that may see it, in its order, and those of all that may not."""
        barred = {}
        for name, pool in self._pools.items():
            if missing := missing_labels(job.spec, pool):
                barred[name] = f"may not see {', '.join(missing)}"
        named = [name for name in job.spec.workers.pools if name in self._pools]
        for name in named:
            if name in barred and self._clearances.record_refusal(job.id, name, barred[name]):
                text = f"no machine of pool {name} works on this job: it {barred[name]}"
                self._jobs.event(job.id, "pool-refused", text, pool=name, why=barred[name])
        return tuple(name for name in named if name not in barred), frozenset(barred)

    def place(self, job: str, name: str, pool: str) -> None:
        """Before a worker of that name is started there."""
        self._clearances.place(job, name, pool, worker_lease_pass(self._settings, job, name))
