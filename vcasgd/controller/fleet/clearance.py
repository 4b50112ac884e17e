"""Clearance of pools: which ones may see the code, model, and data of a job."""

from __future__ import annotations

from collections.abc import Mapping

from vcasgd.fleet.pools import JOIN, PoolChoice, PoolSpec, pools_of_job
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.store.admission import worker_lease_pass
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.ledger.placement import Clearances, Owners
from vcasgd.worker_names import machine_of


def missing_labels(spec: JobSpec, pool: PoolSpec) -> list[str]:
    """Return the labels of the job that the pool may not see, in order."""
    return [label for label in spec.required_labels if label not in pool.labels]


class ClearancePolicy:
    """Keeps jobs out of pools that may not see them; the ledger checks it again for each lease."""

    def __init__(self, settings: Settings, ledger: RedisClient) -> None:
        self._settings = settings
        self._jobs = Jobs(ledger)
        self._clearances = Clearances(ledger)
        self._machines = JoinedMachines(ledger, settings.lease_seconds)
        self._owners = Owners(ledger)
        self._published: dict[str, frozenset[str]] | None = None
        self._pools: dict[str, PoolSpec] = {}

    def set_pools(self, pools: dict[str, PoolSpec]) -> None:
        """Set the present pools, and publish their labels to the ledger before anything else."""
        allowed = {name: frozenset(pool.labels) for name, pool in pools.items()}
        if allowed != self._published:
            self._clearances.allow(allowed)
            self._published = allowed
        self._pools = pools

    def divide(self, job: JobRecord) -> tuple[tuple[str, ...], frozenset[str]]:
        """Return the job's pools that may see it, in its order, and all pools that may not."""
        barred = {}
        for name, pool in self._pools.items():
            if missing := missing_labels(job.spec, pool):
                barred[name] = f"may not see {', '.join(missing)}"
        named = [name for name in self.wanted(job) if name in self._pools]
        for name in named:
            if why := barred.get(name):
                text = f"pool {name} can't run this job: it {why}"
                self._jobs.announce(job.id, text, "pool-refused", text, pool=name, why=why)
        return tuple(name for name in named if name not in barred), frozenset(barred)

    def wanted(self, job: JobRecord) -> tuple[str, ...]:
        """Return the pools that the job names, or the default ones."""
        return pools_of_job(
            job.spec,
            [
                PoolChoice(name, pool.spot, pool.labels, pool.provider == JOIN)
                for name, pool in self._pools.items()
            ],
        )

    def is_volunteer(self, pool: str) -> bool:
        """Return True if the machines of a pool belong to people who aren't well known."""
        return pool in self._pools and self._pools[pool].trust == "volunteer"

    def place(self, pools: Mapping[str, Mapping[str, str]]) -> None:
        """Record pools and owners of each job's workers; call it before they are started."""
        self._owners.place(
            {
                job: {
                    worker: self._machines.owner(machine_of(worker))
                    for worker, pool in workers.items()
                    if self.is_volunteer(pool)
                }
                for job, workers in pools.items()
            }
        )
        self._clearances.place(
            {
                job: {
                    worker: (pool, worker_lease_pass(self._settings, job, worker))
                    for worker, pool in workers.items()
                }
                for job, workers in pools.items()
            }
        )
