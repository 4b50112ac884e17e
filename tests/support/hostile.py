"""A holder of one job's credentials who misuses them, and proof that all others go on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from support.api_harness import Api
from support.harness import Harness, RedisServer
from support.servers import require_binary
from support.training import Training
from support.waiting import PATIENCE, await_truth
from vcasgd.errors import StoreError
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import LedgerKeys, TensorKeys
from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.leases import Leases

#: Pages that are not in the API's document. The dashboard has one document for all its pages.
PAGES = ("/", "/healthz", "/readyz", "/metrics")


@contextmanager
def platform(home: Path, kind: str) -> Iterator[Harness]:
    """Run servers of a kind with a job loop and a parameter server; workers have ACL users."""
    harness = Harness(home, binary=require_binary(kind), heartbeat=0.25)
    harness.bind_workers("only the platform knows")
    harness.start_job_loop()
    harness.start_servers()
    try:
        yield harness
    finally:
        harness.end()
        sys.stdout.write(harness.logs())


def platform_api(harness: Harness) -> Api:
    """Start an API process of the platform."""
    assert isinstance(harness.ledger, RedisServer)
    return Api(harness.home, harness.ledger).start()


class Hostile:
    """A process with the credentials of one worker of a job."""

    def __init__(self, harness: Harness, job: str, name: str = "hostile") -> None:
        self.harness, self.job, self.name = harness, job, name
        env = harness.credentials(job, name)
        self.ledger: RedisClient = connect(env["VCASGD_LEDGER_URL"])
        self.tensors: RedisClient = connect(env["VCASGD_TENSORS_URL"])
        self.keys, self.tensor_keys = LedgerKeys(job), TensorKeys(job)

    def sign_in(self, *, tensors: bool = False) -> None:
        """Wait until the platform has created its users."""
        leases = Leases(self.ledger, self.job, self.name, 10)
        await_truth(lambda: works(lambda: leases.renew({"at": 0.0}, [])))
        if tensors:
            await_truth(lambda: works(lambda: self.tensors.get(self.tensor_keys.meta)))

    def await_expulsion(self) -> JobRecord:
        """Wait until the job has failed because of what was written; return its record."""
        await_truth(lambda: self.harness.jobs.get(self.job).state is JobState.FAILED)
        await_truth(lambda: not works(self.ledger.ping))
        (event,) = await_truth(lambda: self.harness.events(self.job, "job-quarantined"))
        job = self.harness.jobs.get(self.job)
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
        paths = http.get("openapi.json").json()["paths"]
        # Machines that have joined have routes that no other token may use.
        readable = [path for path, methods in paths.items() if "get" in methods]
        for path in [path for path in readable if "{machine}" not in path]:
            for url in _urls(path, jobs):
                _assert_answers(http, f"{api.url}{url}", stream=path.endswith("/stream"))
        for page in PAGES:
            _assert_answers(http, f"{api.url}{page}", stream=False)
    text = httpx.get(f"{api.url}/metrics", trust_env=False, timeout=PATIENCE).text
    assert "vcasgd_jobs" in text


def _urls(path: str, jobs: list[str]) -> set[str]:
    path = path.replace("{digest}", "0" * 64)
    return {path.replace("{job}", job) for job in jobs} if "{job}" in path else {path}


def _assert_answers(http: httpx.Client, url: str, *, stream: bool) -> None:
    # On a busy machine, the API may have to ask for another attempt.
    await_truth(lambda: _answers(http, url, stream=stream))


def _answers(http: httpx.Client, url: str, *, stream: bool) -> bool:
    with http.stream("GET", url, follow_redirects=True) as answer:
        if answer.status_code == 503:
            return False
        # Jobs without a model, and names of other things.
        unknown = "{" in url or "0" * 64 in url
        allowed = (200, 404, 409) if unknown or url.endswith("/model") else (200,)
        assert answer.status_code in allowed, f"{url}: {answer.read().decode()}"
        if stream:
            # The first message about the state of the platform.
            assert re.match("(event|id|data|:)", next(answer.iter_lines()))
    return True


def train_on(harness: Harness, victim: Training) -> None:
    """Train another job to its end; all processes of the platform must still be alive."""
    victim.await_success()
    assert all(server.alive for server in harness.servers.values())
