"""Secrets of jobs in the ledger: who can read them, and how workers get them."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from support.harness import RedisServer
from support.servers import url_of
from support.waiting import await_truth
from support.world import spec_of

from vcasgd.encryption import Recipient, StorageCipher
from vcasgd.errors import JobUnreadable, StoreDenied, StoreUnavailable
from vcasgd.store.acl import (
    LEDGER_SCRIPTS,
    AclUsers,
    address_proof,
    lease_pass,
    ledger_user,
    worker_key,
)
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.job_secrets import SecretDelivery, encrypt_secrets, receive_secrets
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.placement import Clearances
from vcasgd.store.ledger.workers import JobWorkers

CIPHER = StorageCipher("k" * 48)
VALUES = {"API_TOKEN": "a-secret-value", "PEM": "two\nlines"}
SECONDS = 30.0
SECRET = "a secret of the cluster"


def pass_of(job: str, worker: str) -> str:
    return lease_pass(worker_key(SECRET, job, worker))


def request_of(job: str, worker: str, recipient: Recipient, lease_pass: str | None = None) -> str:
    own = pass_of(job, worker) if lease_pass is None else lease_pass
    return f"{recipient.address} {address_proof(own, recipient.address)}"


def delivery_of(
    ledger: RedisClient, job: str, cipher: StorageCipher | None = CIPHER
) -> SecretDelivery:
    return SecretDelivery(ledger, job, cipher, partial(pass_of, job))


def received(as_worker: RedisClient, job: str, worker: str = "w-1") -> dict[str, str]:
    return receive_secrets(as_worker, job, worker, pass_of(job, worker), SECONDS)


@pytest.fixture
def job(ledger: RedisClient) -> str:
    """A job with secrets and a label."""
    spec = spec_of(secrets={name: {} for name in VALUES}, labels=["eu-only"])
    record, _ = Jobs(ledger).submit_once(
        spec, "0" * 64, encrypt=lambda job: encrypt_secrets(CIPHER, job, VALUES)
    )
    clearances = Clearances(ledger)
    clearances.allow({"eu": ["eu-only"], "us": []})
    clearances.place(
        {record.id: {"w-1": ("eu", ""), "w-2": ("eu", ""), "w-3": ("eu", ""), "far": ("us", "")}}
    )
    return record.id


@pytest.fixture
def as_worker(server: RedisServer, ledger: RedisClient, job: str) -> Iterator[RedisClient]:
    """Return a client that is logged in as the job's workers are."""
    user = ledger_user(SECRET, job)
    AclUsers(ledger, LEDGER_SCRIPTS, 0).sync([user])
    client = connect(user.url(url_of(server, 0)))
    yield client
    client.close()
    ledger.execute_command("ACL", "DELUSER", user.name)


@pytest.fixture
def answering(ledger: RedisClient, job: str) -> Iterator[None]:
    """Answer requests as the controller does."""
    delivery, ended = delivery_of(ledger, job), threading.Event()

    def answer() -> None:
        while not ended.wait(0.01):
            delivery.answer()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answer)
        yield
        ended.set()
        running.result(SECONDS)


def test_a_worker_gets_the_secrets_and_nobody_can_read_them(
    ledger: RedisClient, as_worker: RedisClient, job: str, answering: None
) -> None:
    keys = LedgerKeys(job)

    assert received(as_worker, job) == VALUES
    # Also a second worker of that name, which has another key
    assert received(as_worker, job) == VALUES

    stored = [ledger.get(keys.secrets) or b"", *ledger.hvals(keys.secret_answers)]
    assert len(stored) == 2
    for value in VALUES.values():
        assert not any(value.encode() in each for each in stored)
    assert not ledger.exists(keys.secret_requests)


def test_a_worker_can_read_no_stored_secret_and_answer_no_request(
    as_worker: RedisClient, job: str
) -> None:
    keys = LedgerKeys(job)
    calls: list[Callable[[], object]] = [
        lambda: as_worker.get(keys.secrets),
        lambda: as_worker.hset(keys.secret_answers, "w-2", "forged"),
        lambda: as_worker.hgetall(keys.secret_requests),
        lambda: as_worker.hget(LedgerKeys("other-job").secret_answers, "w-1"),
    ]
    for call in calls:
        with pytest.raises(StoreDenied):
            call()


@pytest.mark.parametrize("name", ["far", "unplaced", "w-2"])
def test_a_worker_that_may_not_see_the_data_gets_no_secrets(
    ledger: RedisClient, job: str, name: str
) -> None:
    """One in a pool without the label, one that nobody placed, and one in quarantine."""
    JobWorkers(ledger).quarantine(job, "w-2", "checksum")
    keys, delivery = LedgerKeys(job), delivery_of(ledger, job)
    for worker in (name, "w-1"):
        ledger.hset(keys.secret_requests, worker, request_of(job, worker, Recipient()))

    delivery.answer()

    assert ledger.hkeys(keys.secret_answers) == [b"w-1"]


@pytest.mark.parametrize("rogue", ["far", "w-2"])
def test_a_worker_gets_no_secrets_under_another_name(
    ledger: RedisClient, as_worker: RedisClient, job: str, rogue: str
) -> None:
    """One in a pool without the label, and one in quarantine, with all that they have."""
    JobWorkers(ledger).quarantine(job, "w-2", "checksum")
    keys, recipient = LedgerKeys(job), Recipient()
    passes = {"none": "", "its own": pass_of(job, rogue)}
    requests = [request_of(job, "w-1", recipient, text) for text in passes.values()]
    # What it sees of the other one is the digest of the pass.
    seen = hashlib.sha1(pass_of(job, "w-1").encode()).hexdigest()
    requests += [request_of(job, "w-1", recipient, seen), recipient.address]

    for request in requests:
        as_worker.hset(keys.secret_requests, "w-1", request)
        delivery_of(ledger, job).answer()
        assert not ledger.exists(keys.secret_answers)
        assert not ledger.exists(keys.secret_requests)

    # and the worker itself gets them at any time
    as_worker.hset(keys.secret_requests, "w-1", request_of(job, "w-1", recipient))
    delivery_of(ledger, job).answer()
    answer = as_worker.hget(keys.secret_answers, "w-1")
    assert json.loads(recipient.decrypt(answer.decode(), f"{job}/w-1")) == VALUES


def test_a_worker_waits_in_bounded_time_and_reports_progress(
    as_worker: RedisClient, job: str
) -> None:
    waits: list[float] = []

    with pytest.raises(StoreUnavailable, match="no controller delivered"):
        receive_secrets(as_worker, job, "w-1", "", 0.3, lambda: waits.append(time.monotonic()))

    assert waits


@pytest.mark.parametrize(
    ("cipher", "reason"), [(StorageCipher("x" * 48), "another key"), (None, "is not set")]
)
def test_a_controller_without_the_key_says_so(
    ledger: RedisClient, job: str, cipher: StorageCipher | None, reason: str
) -> None:
    ledger.hset(LedgerKeys(job).secret_requests, "w-1", request_of(job, "w-1", Recipient()))

    with pytest.raises(JobUnreadable, match=reason):
        delivery_of(ledger, job, cipher).answer()


def test_secrets_end_with_the_job(
    ledger: RedisClient, as_worker: RedisClient, job: str, answering: None
) -> None:
    keys = LedgerKeys(job)
    received(as_worker, job)
    assert ledger.exists(keys.secrets, keys.secret_answers) == 2

    Jobs(ledger).transition(job, JobState.FAILED, [JobState.STARTING], why="test")

    await_truth(lambda: not ledger.exists(keys.secrets, keys.secret_answers, keys.secret_requests))
