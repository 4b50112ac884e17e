"""The worker process: lease a subtask, fetch the model, train, push the update.

It keeps nothing that can't be lost: it can be killed at any line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vcasgd.settings import Settings
from vcasgd.store.acl import lease_pass
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases


@dataclass(frozen=True)
class WorkerContext:
    """The parts of a worker that never change.

    ``nodes`` are the tensors servers of all store nodes; ``key`` signs this worker's updates;
    None if workers have no keys.
    """

    settings: Settings
    job: str
    name: str
    key: str | None
    ledger: RedisClient
    nodes: Sequence[RedisClient]
    jobs: Jobs
    leases: Leases

    @classmethod
    def connect(cls, settings: Settings, job: str, name: str) -> WorkerContext:
        """Connect to the servers in the settings. Raises :class:`~vcasgd.errors.SpecError`."""
        ledger = connect(settings.required("ledger_url"))
        nodes = [connect(url, waits=False) for url in settings.tensors_urls()]
        key = settings.worker_key.get_secret_value() if settings.worker_key else None
        own_pass = lease_pass(key) if key else ""
        leases = Leases(ledger, job, name, settings.lease_seconds, own_pass)
        return cls(settings, job, name, key, ledger, nodes, Jobs(ledger), leases)
