"""Event stream of the platform: its state, changes, and each event once."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

import httpx
from httpx_sse import ServerSentEvent
from support.api_harness import Api, messages_of
from support.fleet_records import machine_row
from support.waiting import PATIENCE, await_truth

from vcasgd.api.platform import MAX_EVENTS, NEWEST_JOBS

STREAM = {"Accept": "text/event-stream"}


@contextmanager
def following(
    http: httpx.Client, after: str | None = None, **headers: str
) -> Iterator[Iterator[ServerSentEvent]]:
    params = {"after": after} if after else {}
    with http.stream("GET", "stream", params=params, headers=STREAM | headers) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        yield messages_of(response)


def until(
    messages: Iterator[ServerSentEvent], what: str, /, **wanted: Any
) -> tuple[str, dict[str, Any]]:
    """The first message like this."""
    deadline = time.monotonic() + PATIENCE
    # A stream that has nothing to say repeats itself now and then.
    for message in takewhile(lambda _: time.monotonic() < deadline, messages):
        data = json.loads(message.data)
        if message.event == what and wanted.items() <= data.items():
            return message.id or "", data
    raise AssertionError(f"no {what} with {wanted}")


def test_stream_sends_the_state_and_its_changes(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    with following(http) as messages:
        until(messages, "fleet", controller=False)
        until(messages, "store", nodes={})
        until(messages, "job", id=job, state="starting")

        api.control.publish({"i-1": machine_row("i-1", price_per_hour=2.0)}, {})
        api.servers.beat("node-0", {"versions": {job: 3}, "queued": {job: 1}})
        api.start_job(job)

        _, machines = until(messages, "machines", whole=False)
        assert machines["changed"][0] | {"id": "i-1", "state": "running"} == machines["changed"][0]
        until(messages, "fleet", usd_per_hour=2.0, machines=1)
        _, store = until(messages, "store")
        assert store["nodes"]["node-0"]["versions"] == {job: 3}
        assert until(messages, "job", id=job, state="running")[1]["fraction"] == 0.0


def test_stream_names_deleted_jobs(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    api.finish(job)
    with following(http) as messages:
        until(messages, "fleet", deleted=[])
        assert http.delete(f"jobs/{job}").is_success
        until(messages, "fleet", deleted=[job])


def test_only_what_changed_is_sent(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    rows = {f"i-{number}": machine_row(f"i-{number}") for number in range(500)}
    api.control.publish(rows, {})
    with following(http) as messages:
        first: list[dict[str, Any]] = []
        # The first state may be one before these machines.
        while sum(len(part["changed"]) for part in first) < 500:
            first.append(until(messages, "machines")[1])
        api.control.update({"i-7": machine_row("i-7", state="leaving")}, ["i-8"], None)
        _, machines = until(messages, "machines")
        api.jobs.cancel(job)
        until(messages, "job", id=job, state="cancelled")
    api.control.publish({}, {})

    assert [len(part["changed"]) for part in first][-3:] == [200, 200, 100]
    assert [part["whole"] for part in first] == [True] + [False] * (len(first) - 1)
    assert [row["id"] for row in machines["changed"]] == ["i-7"]
    assert (machines["whole"], machines["removed"]) == (False, ["i-8"])


def test_more_readers_cost_the_ledger_nothing(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    api.start_job(job)

    def cost_of_changes(readers: int, first: int) -> int:
        """Return the ledger's requests in five changes that every reader receives."""
        with ExitStack() as stack:
            streams = [stack.enter_context(following(http)) for _ in range(readers)]
            for messages in streams:
                until(messages, "job", id=job)
            before = api.connection.info("stats")["total_reads_processed"]
            for version in range(first, first + 5):
                api.account(job, version, 0)
                for messages in streams:
                    until(messages, "job", version=version)
            return int(api.connection.info("stats")["total_reads_processed"] - before)

    alone, together = cost_of_changes(1, 1), cost_of_changes(12, 6)
    assert together < 2 * alone


@contextmanager
def not_reading(api: Api) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", api.port))
        connection.sendall(
            b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n"
            b"Authorization: Bearer %s\r\nAccept: text/event-stream\r\n\r\n" % api.token.encode()
        )
        yield connection


def queued(api: Api, reader: socket.socket) -> tuple[int, int]:
    """Return the bytes that the kernel has not sent to the reader, and those it has not read."""
    ends = f":{api.port:04X}", f":{reader.getsockname()[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    queues = {(row[1][8:], row[2][8:]): row[4].split(":") for row in rows}
    unsent, unread = queues[ends][0], queues[ends[::-1]][1]
    return int(unsent, 16), int(unread, 16)


def test_a_reader_that_does_not_read_stalls_no_other(api: Api, http: httpx.Client) -> None:
    # Given a state of 12 MB, more than the kernel's buffers of a connection hold
    rows = {f"i-{n}": machine_row(f"i-{n}", host="h" * 1000) for n in range(12_000)}
    api.control.publish(rows, {})
    job = api.submit()
    versions = count(1)
    with following(http) as messages:
        until(messages, "job", id=job)

        def full() -> tuple[int, int] | None:
            """Return the sizes of a reader's buffers that stayed full while the other one read.

            None if the server, which is slow, too, has ended the connection before.
            """
            with not_reading(api) as blocked, suppress(KeyError):
                while True:
                    before = queued(api, blocked)
                    for version in islice(versions, 3):
                        api.account(job, version, 0)
                        until(messages, "job", version=version)
                    if min(before) > 0 and queued(api, blocked) == before:
                        return before
            return None

        # When both buffers of one reader are full, so that nothing more can be sent to it,
        # then the other one receives changes
        assert sum(await_truth(full)) < 10_000_000
    api.control.publish({}, {})


def test_overview_has_the_rows_of_the_stream(api: Api, http: httpx.Client) -> None:
    first, second = api.submit(), api.submit()
    api.finish(first)
    with following(http) as messages:
        _, row = until(messages, "job", id=second)
    found = [each for each in http.get("overview").json() if each["id"] in (first, second)]
    assert [each["id"] for each in found] == [second, first]
    assert found[0] == row
    assert found[1]["state"] == "succeeded"


def test_reconnecting_reader_receives_each_event_once(api: Api, http: httpx.Client) -> None:
    first, second = api.submit(), api.submit()
    with following(http) as messages:
        begun, _ = until(messages, "job", id=first)
        for number in range(6):
            api.jobs.event((first, second)[number % 2], "count", "", number=number)
            time.sleep(0.002)  # events of one millisecond are ordered by job
        place, _ = until(messages, "event", kind="count", details={"number": 2})
    api.finish(first)
    # The header overrides the parameter.
    with following(http, after="0-0", **{"Last-Event-ID": place}) as messages:
        seen = []
        while len(seen) < 4:
            _, event = until(messages, "event")
            seen.append((event["job"], event["kind"], event["details"].get("number")))
    with following(http, after=begun) as messages:
        again = [until(messages, "event", kind="count")[1]["details"]["number"] for _ in range(6)]

    assert seen == [
        (second, "count", 3), (first, "count", 4), (second, "count", 5),
        (first, "job-succeeded", None),
    ]  # fmt: skip
    assert again == list(range(6))


def test_a_reader_far_behind_receives_each_event_once(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    count = 2 * MAX_EVENTS + 50
    for number in range(count):
        api.jobs.event(job, "count", "", number=number)
    with following(http, after="0-0") as messages:
        seen = [until(messages, "event", job=job)[1] for _ in range(count + 1)][1:]
        api.jobs.event(job, "count", "", number=count)
        seen.append(until(messages, "event", job=job)[1])

    assert [event["details"]["number"] for event in seen] == list(range(count + 1))


def test_reconnecting_reader_receives_the_end_of_a_job_behind_many_newer_ones(
    api: Api, http: httpx.Client
) -> None:
    job = api.submit()
    place = f"{int(api.connection.now() * 1000)}-0"
    for _ in range(NEWEST_JOBS):
        api.submit()
    api.finish(job)

    with following(http, after=place) as messages:
        until(messages, "event", job=job, kind="job-succeeded")


def test_new_reader_receives_no_old_events(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    # the API may share a slightly older observation
    with following(http) as messages:
        until(messages, "job", id=job)
        api.jobs.event(job, "count", "", number=1)
        until(messages, "event", kind="count")
    with following(http) as messages:
        until(messages, "job", id=job)
        api.jobs.event(job, "count", "", number=2)

        assert until(messages, "event")[1]["details"] == {"number": 2}


def test_stream_sends_at_most_two_states_per_second(api: Api, http: httpx.Client) -> None:
    job = api.submit()
    api.start_job(job)
    with following(http) as messages:
        until(messages, "job", id=job)
        started, seen = time.monotonic(), 0
        for version in range(1, 5):
            api.account(job, version, 0)
            until(messages, "job", version=version)
            seen += 1

    assert time.monotonic() - started > (seen - 1) * 0.4
