"""A cluster with a public page, and volunteers that have worked for a job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.api_harness import Api, running
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.contributors import Contributors


@contextmanager
def public_api(home: Path) -> Iterator[Api]:
    """Run an API of a cluster with a public page."""
    with running(home) as api:
        api.end()
        api.start(VCASGD_PUBLIC_PAGE="true")
        yield api


def work_of_volunteers(api: Api, job: str) -> None:
    """Two people with nicknames, one without, and a machine of the cluster have worked."""
    contributors = Contributors(api.connection)
    tokens = {f"{job}.join-{token}-1": token for token in ("t-ann", "t-bob", "t-eve", "t-mia")}
    contributors.place({job: tokens})
    contributors.set_nickname("t-ann", "Night Owl")
    contributors.set_nickname("t-bob", "Bob")
    counts = dict(zip(tokens, (40, 30, 5, 5), strict=True))
    ids = {worker: str(contributors.of_worker(job, worker)) for worker in tokens}
    api.start_job(job)
    contributions = {ids[worker]: count for worker, count in counts.items()}
    api.account(job, 5, 1, applied=100, samples=100, contributions=contributions)
    for worker in tokens:
        beat = json.dumps({"at": 5.0, "doing": "training", "host": "secret-host.lan"})
        api.connection.hset(LedgerKeys(job).workers, worker, beat)
