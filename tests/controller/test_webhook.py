"""The webhook of the controller, with a real ledger and a real receiver."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from support.children import ForkedProcess
from support.harness import RedisServer
from support.http_servers import LocalServer, QuietHandler
from support.ports import free_port
from support.waiting import PATIENCE, await_truth
from support.world import spec_of

from vcasgd.controller import webhook
from vcasgd.controller.webhook import Webhook, signature
from vcasgd.settings import Settings
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.events import EventFeed
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.jobs import Jobs

SECRET = "a-secret-of-the-webhook"


class Receiver(LocalServer):
    """Server that records requests. ``statuses`` are its next answers, then 204."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(_Handler, port)
        self.received: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        #: While it is clear, no request is answered.
        self.answering = threading.Event()
        self.answering.set()

    def stop(self) -> None:
        self.answering.set()
        super().stop()

    @property
    def url(self) -> str:
        return f"{super().url}/hook?token=in-the-url"

    @property
    def texts(self) -> list[str]:
        return [json.loads(body)["text"] for _, body in self.received]


class _Handler(QuietHandler):
    server: Receiver

    def do_POST(self) -> None:
        self.server.received.append((dict(self.headers), self.body()))
        self.server.answering.wait(PATIENCE)
        self.answer(self.server.statuses.pop(0) if self.server.statuses else 204)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        yield server


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK_SECONDS": 0.02, "FIRST_PAUSE": 0.02, "MAX_PAUSE": 0.05}.items():
        monkeypatch.setattr(webhook, name, value)
    # An event whose answer is late is posted again.
    monkeypatch.setattr(webhook, "REQUEST_SECONDS", PATIENCE)


@contextmanager
def posting(
    ledger: RedisClient,
    url: str,
    sure: Callable[[], bool] = lambda: True,
    max_age_seconds: float = webhook.MAX_AGE_SECONDS,
    **options: Any,
) -> Iterator[Webhook]:
    settings = Settings(webhook_url=SecretStr(url), webhook_secret=SecretStr(SECRET), **options)
    thread = Webhook(settings, ledger, sure, max_age_seconds)
    thread.start()
    await_truth(lambda: ledger.exists("vcasgd:{fleet}:webhook") or not sure())
    yield thread
    thread.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_events_are_posted_in_order_signed_and_once(
    ledger: RedisClient, jobs: Jobs, receiver: Receiver
) -> None:
    jobs.submit(spec_of(), "0" * 64)  # before the first start
    for number in range(2):  # with two controllers, one after the other
        with posting(ledger, receiver.url):
            job = jobs.submit(spec_of(), "0" * 64).id
            jobs.event(job, "note", f"first {number}", answer=42)
            jobs.event(job, "note", f"second {number}")
            await_truth(lambda number=number: len(receiver.received) == 3 * (number + 1))

    submitted = "job was submitted"
    assert receiver.texts == [submitted, "first 0", "second 0", submitted, "first 1", "second 1"]
    headers, body = receiver.received[1]
    assert json.loads(body)["details"] == {"answer": 42}
    assert json.loads(body)["cluster"] == "vcasgd"
    assert json.loads(body)["kind"] == "note"
    wanted = signature(SECRET, headers["Vcasgd-Timestamp"], body)
    assert headers["Vcasgd-Signature"] == f"sha256={wanted}"
    assert len({headers["Vcasgd-Delivery"] for headers, _ in receiver.received}) == 6


def test_the_end_of_a_job_is_posted_that_has_many_newer_ones(
    ledger: RedisClient, jobs: Jobs, receiver: Receiver
) -> None:
    with posting(ledger, receiver.url, webhook_events="job-failed"):
        first = jobs.submit(spec_of(), "0" * 64).id
    for _ in range(150):
        jobs.submit(spec_of(), "0" * 64)
    jobs.transition(first, JobState.FAILED, [JobState.STARTING], why="it failed")

    with posting(ledger, receiver.url, webhook_events="job-failed"):
        await_truth(lambda: receiver.texts == ["it failed"])


def test_an_event_is_retried_until_it_is_accepted_or_refused_for_good(
    ledger: RedisClient, jobs: Jobs, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.statuses += [204, 503, 429, 204, 410, *[500] * 20]
    with posting(ledger, receiver.url):
        job = jobs.submit(spec_of(), "0" * 64).id
        for name in ("retried", "gone", "failing"):
            jobs.event(job, "note", name)
        # Workers can write events with any text.
        jobs.event(job, "note\r\nX-Header: ü", "last")
        await_truth(lambda: receiver.texts[-1:] == ["last"])

    counts = {name: receiver.texts.count(name) for name in receiver.texts}
    expected = {"retried": 3, "gone": 1, "failing": 21, "last": 1}
    assert counts == {"job was submitted": 1, **expected}
    refused = [each for each in caplog.messages if "is refused" in each]
    assert [each.rpartition(": ")[2] for each in refused] == ["status 410"]


def test_only_the_chosen_kinds_are_posted(
    ledger: RedisClient, jobs: Jobs, receiver: Receiver
) -> None:
    with posting(ledger, receiver.url, webhook_events="job-failed job-succeeded"):
        job = jobs.submit(spec_of(), "0" * 64).id
        jobs.event(job, "note", "not wanted")
        jobs.event(job, "job-failed", "wanted")
        await_truth(lambda: receiver.received)

    assert receiver.texts == ["wanted"]


def test_only_the_leader_posts(ledger: RedisClient, jobs: Jobs, receiver: Receiver) -> None:
    with posting(ledger, receiver.url), posting(ledger, receiver.url, lambda: False):
        jobs.submit(spec_of(), "0" * 64)
        await_truth(lambda: receiver.received)

    assert len(receiver.received) == 1


def test_a_stop_in_a_pause_loses_no_event(
    ledger: RedisClient, jobs: Jobs, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a receiver that fails, and a controller that is stopped while it waits to try again
    monkeypatch.setattr(webhook, "FIRST_PAUSE", PATIENCE)
    receiver.statuses += [503]
    with posting(ledger, receiver.url):
        job = jobs.submit(spec_of(), "0" * 64).id
        jobs.event(job, "note", "second")
        await_truth(lambda: receiver.received)

    # When the next controller starts
    with posting(ledger, receiver.url):
        await_truth(lambda: receiver.texts[-1:] == ["second"])

    # Then the event comes again, and before the others
    assert receiver.texts == ["job was submitted", "job was submitted", "second"]


def test_a_receiver_that_was_down_gets_all_events_from_another_controller(
    ledger: RedisClient, ledger_server: RedisServer, jobs: Jobs, tmp_path: Path
) -> None:
    # Given a controller whose receiver is down
    port = free_port()
    env = {
        "VCASGD_LEDGER_URL": ledger_server.files.url,
        "VCASGD_WEBHOOK_URL": f"http://127.0.0.1:{port}/?token=in-the-url",
    }
    log = tmp_path / "controller.log"
    first = ForkedProcess("support.webhooks:main", [], log, env)
    try:
        await_truth(lambda: ledger.exists("vcasgd:{fleet}:webhook"))
        job = jobs.submit(spec_of(), "0" * 64).id
        for number in range(5):
            jobs.event(job, "note", f"{number}")
        await_truth(lambda: "is posted again" in log.read_text())
    finally:
        # When it is killed, and the receiver is back for the next one
        first.kill()
    jobs.event(job, "note", "5")
    with Receiver(port) as receiver:
        second = ForkedProcess("support.webhooks:main", [], log, env)
        try:
            await_truth(lambda: receiver.texts[-1:] == ["5"])
        finally:
            second.kill()

    # Then no event is missing, and none is counted as dropped
    assert receiver.texts == ["job was submitted", *map(str, range(6))]
    assert [json.loads(body)["dropped"] for _, body in receiver.received] == [0] * 7
    assert "in-the-url" not in log.read_text()


def test_events_that_are_too_old_are_counted_for_the_receiver(
    ledger: RedisClient, jobs: Jobs, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    with posting(ledger, "http://127.0.0.1:1/", webhook_events="note"):
        job = jobs.submit(spec_of(), "0" * 64).id
        for number in range(3):
            jobs.event(job, "note", f"{number}")
    age = EventFeed(ledger).now()

    # When a controller finds that all of them are too old
    await_truth(lambda: EventFeed(ledger).now() > age + 100)
    with posting(ledger, receiver.url, max_age_seconds=0.1, webhook_events="note"):
        await_truth(lambda: "3 events are dropped" in caplog.text)
    with posting(ledger, receiver.url, webhook_events="note"):
        jobs.event(job, "note", "new")
        jobs.event(job, "note", "next")
        await_truth(lambda: receiver.texts[-1:] == ["next"])

    # Then the next one says so
    bodies = [json.loads(body) for _, body in receiver.received]
    assert [(each["text"], each["dropped"]) for each in bodies] == [("new", 3), ("next", 0)]


def test_a_receiver_that_hangs_delays_events_and_nothing_else(
    ledger: RedisClient,
    jobs: Jobs,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(webhook, "REQUEST_SECONDS", 0.1)
    receiver.answering.clear()
    with posting(ledger, receiver.url):
        job = jobs.submit(spec_of(), "0" * 64).id
        await_truth(lambda: "until it arrives: ReadTimeout" in caplog.text)
        receiver.answering.set()
        jobs.event(job, "note", "after")
        await_truth(lambda: receiver.texts[-1:] == ["after"])

    assert "in-the-url" not in caplog.text
