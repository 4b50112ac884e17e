"""A holder of one job's credentials who misuses them, and proof that all others go on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.api_harness import Api, operations
from support.fleet_records import events_of
from support.harness import Harness
from support.servers import require_binary
from support.training import Training
from support.waiting import PATIENCE, await_truth
from vcasgd.errors import StoreError
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import LedgerKeys, TensorKeys
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases

SECRET = "only the platform knows"
#: Digest of nothing.
NONE = "0" * 64
#: Pages that are not in the API's document. The dashboard has one document for all its pages.
PAGES = ("/", "/healthz", "/readyz", "/metrics")


@contextmanager
def bounded(home: Path, **options: Any) -> Iterator[Harness]:
    """Run servers without processes beside them; workers have ACL users."""
    harness = Harness(home, **options)
    harness.bind_workers(SECRET)
    try:
        yield harness
    finally:
        harness.end()
        sys.stdout.write(harness.logs())


@contextmanager
def platform(home: Path, kind: str) -> Iterator[Harness]:
    """Run servers of a kind with a job loop and a parameter server."""
    with bounded(home, binary=require_binary(kind), heartbeat=0.25) as harness:
        harness.start_job_loop()
        harness.start_servers()
        yield harness


def platform_api(harness: Harness) -> Api:
    return Api(harness.home, harness.ledger).start()


class Hostile:
    """A process with the credentials of one worker of a job, which are in ``env``."""

    name = "hostile"

    def __init__(self, jobs: Jobs, job: str, env: Mapping[str, str]) -> None:
        self._jobs, self.job = jobs, job
        self.ledger: RedisClient = connect(env["VCASGD_LEDGER_URL"])
        self.tensors: RedisClient = connect(env["VCASGD_TENSORS_URL"])
        self.keys, self.tensor_keys = LedgerKeys(job), TensorKeys(job)

    @classmethod
    def of(cls, harness: Harness, job: str) -> Hostile:
        """Return one that the platform has admitted."""
        hostile = cls(harness.jobs, job, harness.credentials(job, cls.name))
        hostile.sign_in()
        return hostile

    def sign_in(self) -> None:
        """Wait until the platform has created its users."""
        leases = Leases(self.ledger, self.job, self.name, 10)
        await_truth(lambda: works(lambda: leases.renew({"at": 0.0}, [])))
        await_truth(lambda: works(lambda: self.tensors.get(self.tensor_keys.meta)))

    def await_expulsion(self) -> JobRecord:
        """Wait until the job has failed because of what was written; return its record."""
        await_truth(lambda: self._jobs.get(self.job).state is JobState.FAILED)
        await_truth(lambda: not works(self.ledger.ping))
        (event,) = await_truth(lambda: events_of(self._jobs, self.job, "job-quarantined"))
        job = self._jobs.get(self.job)
        assert job.reason
        assert job.reason in event["text"]
        return job

    def close(self) -> None:
        self.ledger.close()
        self.tensors.close()


def works(call: Callable[[], Any]) -> bool:
    try:
        call()
    except StoreError:
        return False
    return True


def assert_everything_answers(api: Api, jobs: list[str]) -> None:
    """Request every route that reads, for each job, and every page."""
    with api.http() as http:
        paths = {*PAGES, *readable(http)}
        for url in {path.replace("{job}", job) for path in paths for job in jobs}:
            # On a busy machine, the API may have to ask for another attempt.
            await_truth(lambda url=url: _answers(http, f"{api.url}{url}"))
    text = httpx.get(f"{api.url}/metrics", trust_env=False, timeout=PATIENCE).text
    assert "vcasgd_jobs" in text


def readable(http: httpx.Client) -> list[str]:
    """Return the paths that any token may read; others are those of machines that have joined."""
    found = [path for method, path, _ in operations(http) if method == "get"]
    return [path.replace("{digest}", NONE) for path in found if "{machine}" not in path]


def _answers(http: httpx.Client, url: str) -> bool:
    with http.stream("GET", url, follow_redirects=True) as answer:
        if answer.status_code == 503:
            return False
        # Jobs without a model, and names of other things.
        unknown = "{" in url or NONE in url or url.endswith("/model")
        assert answer.status_code in ((200, 404, 409) if unknown else (200,)), (
            f"{url}: {answer.read().decode()}"
        )
        if url.endswith("/stream"):
            # The first message about the state of the platform.
            assert re.match("(event|id|data|:)", next(answer.iter_lines()))
    return True


def train_on(harness: Harness, victim: Training) -> None:
    """Train another job to its end; all processes of the platform must still be alive."""
    victim.await_success()
    assert all(server.alive for server in harness.servers.values())
