"""Events, log lines, and metrics, as lists and as streams without loss or repetition."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from httpx_sse import ServerSentEvent
from support.api_harness import HEARTBEAT, Api, messages_of
from support.lines import printed
from support.waiting import PATIENCE, await_truth

from vcasgd.api.history import LogReader
from vcasgd.client import Client

STREAM = {"Accept": "text/event-stream"}


def add_events(api: Api, job: str, numbers: range) -> None:
    for number in numbers:
        api.jobs.event(job, "count", f"number {number}", number=number)


def numbers(events: Any) -> list[int]:
    return [event.details["number"] for event in events if event.kind == "count"]


@contextmanager
def in_background(work: Any) -> Iterator[None]:
    """Run ``work`` in a thread, and raise its error in the test."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        yield
        future.result(PATIENCE)


def test_long_histories_are_paged_and_streamed_in_order(
    api: Api, http: httpx.Client, client: Client
) -> None:
    job, lines = api.submit(), [f"line {number}" for number in range(2500)]
    api.jobs.add_logs(job, "w-1", printed(lines))

    assert [line.line for line in client.job(job).logs()] == lines
    assert len(http.get(f"jobs/{job}/logs?limit=7").json()) == 7
    api.finish(job)
    assert [line.line for line in client.job(job).logs(follow=True)] == lines


def test_log_lines_are_filtered_in_lists_and_streams(
    api: Api, http: httpx.Client, client: Client
) -> None:
    # Given many lines of one worker, and few of another one in between
    job = api.submit()
    api.jobs.add_logs(job, f"{job}.chatty", printed(f"step {number}" for number in range(1500)))
    api.jobs.add_logs(job, f"{job}.quiet", printed(["Loss is NaN"], "warning"))
    api.jobs.add_logs(job, f"{job}.chatty", printed(f"step {number}" for number in range(1500)))
    api.finish(job)

    def texts(**query: Any) -> list[str]:
        listed = [line.line for line in client.job(job).logs(**query)]
        assert [line.line for line in client.job(job).logs(follow=True, **query)] == listed
        return listed

    assert texts(grep="loss is") == ["Loss is NaN"]
    assert texts(worker="quiet") == ["Loss is NaN"]
    assert texts(tail=2) == ["step 1498", "step 1499"]
    assert texts(worker="quiet", tail=5) == ["Loss is NaN"]
    assert texts(tail=1, grep="step 12") == ["step 1299"]
    assert len(texts(tail=2500)) == 2500
    assert texts(since=time.time() + 60) == []
    assert len(texts(since=time.time() - 600)) == 3001
    (row,) = http.get(f"jobs/{job}/logs?grep=nan").json()
    assert (row["level"], row["worker"]) == ("warning", f"{job}.quiet")
    assert http.get(f"jobs/{job}/logs?grep={'x' * 201}").status_code == 422


def test_a_log_that_fits_one_read_is_read_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job, read, calls = api.submit(), api.jobs.logs, []
    api.jobs.add_logs(job, f"{job}.w", printed(f"step {number}" for number in range(700)))

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return read(*args, **options)

    monkeypatch.setattr(api.jobs, "logs", counted)
    assert len(LogReader(api.jobs, "", "step")(job, "0", limit=5000)) == 700
    assert len(calls) == 1


def test_metrics_replace_infinities_by_null(api: Api, client: Client) -> None:
    job = api.submit()
    api.jobs.add_metrics(job, {"at": 1.0, "loss": float("nan"), "updates": 3})
    api.jobs.add_metrics(job, {"at": 2.0, "loss": 0.5, "novel": [float("inf")]})

    first, second = client.job(job).metrics()

    assert (first.loss, first.updates) == (None, 3)
    assert (second.loss, second.novel) == (0.5, [None])
    assert [row.at for row in client.job(job).metrics(after=first.id)] == [2.0]


def messages(http: httpx.Client, path: str, **headers: str) -> list[ServerSentEvent]:
    with http.stream("GET", path, headers=STREAM | headers) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Cache-Control"] == "no-store"
        return list(messages_of(response))


def test_stream_sends_the_list_and_then_the_end(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    api.jobs.event(job, "note", "two\nlines, ünïcode and \u2028 too")
    api.finish(job)

    *events, end = messages(http, f"jobs/{job}/events")

    listed = http.get(f"jobs/{job}/events").json()
    assert [json.loads(each.data) for each in events] == listed
    assert [(each.id, each.event) for each in events] == [
        (row["id"], row["kind"]) for row in listed
    ]
    assert (end.event, json.loads(end.data)) == ("end", {"state": "succeeded"})


def test_stream_resumes_after_the_last_event_id(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    add_events(api, job, range(4))
    api.finish(job)
    rows = http.get(f"jobs/{job}/events").json()

    first = messages(http, f"jobs/{job}/events?after={rows[0]['id']}")
    rest = messages(http, f"jobs/{job}/events?after=0", **{"Last-Event-ID": rows[3]["id"]})
    nothing = messages(http, f"jobs/{job}/events", **{"Last-Event-ID": rows[-1]["id"]})

    assert [each.id for each in first[:-1]] == [row["id"] for row in rows[1:]]
    assert [each.id for each in rest[:-1]] == [row["id"] for row in rows[4:]]
    assert [each.event for each in nothing] == ["end"]


def test_log_lines_after_the_end_of_the_job_are_delivered(own_api: Api) -> None:
    # Given an API that waits for minutes, as heartbeats are rare
    own_api.end()
    own_api.start(VCASGD_HEARTBEAT="60")
    job = own_api.submit()
    own_api.finish(job)

    def add_last_lines() -> None:
        time.sleep(HEARTBEAT / 2)
        own_api.jobs.add_logs(job, "w-1", printed(["leaving"]))

    with own_api.client() as client, in_background(add_last_lines):
        line = next(client.job(job).logs(follow=True))

    assert (line.worker, line.line) == ("w-1", "leaving")


def test_many_followers_do_not_delay_other_requests(api: Api, client: Client) -> None:
    job = api.submit()

    def follow() -> list[int]:
        with api.client() as own:
            return numbers(own.job(job).events(follow=True))

    with ThreadPoolExecutor(50) as pool:
        followers = [pool.submit(follow) for _ in range(50)]
        add_events(api, job, range(10))
        for _ in range(10):
            assert client.job(job).state == "starting", "it is answered while they wait"
        api.finish(job)
        assert all(each.result(PATIENCE) == list(range(10)) for each in followers)


@pytest.mark.ci
def test_follower_survives_restarts_of_the_api(own_api: Api) -> None:
    job = own_api.submit()
    stop = threading.Event()
    written = 0

    def add_entries() -> None:
        nonlocal written
        while not stop.is_set():
            add_events(own_api, job, range(written, written + 1))
            written += 1
            time.sleep(0.01)
        own_api.finish(job)

    def fail() -> None:
        try:
            for life in range(3):
                await_truth(lambda life=life: written > 30 * life)
                own_api.kill()
                own_api.start()
        finally:
            stop.set()

    with own_api.client() as client:
        followed = client.job(job)
        with in_background(add_entries), in_background(fail):
            seen = numbers(followed.events(follow=True))

    assert seen == list(range(written))
    assert written > 60
