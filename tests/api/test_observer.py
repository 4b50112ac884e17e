"""One observation of the platform serves all readers, however many jobs and readers there are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.fleet_records import PACKAGE, job_spec
from support.harness import RedisServer

from vcasgd.api.changes import BLOCK_BYTES, MAX_BYTES, MAX_CHANGES, Changes, StateChange, packed
from vcasgd.api.observer import PlatformObserver, PlatformState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.events import EventCursor, EventFeed
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.servers import Control, Servers


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisClient]:
    server = RedisServer(tmp_path_factory.mktemp("ledger"), durable=False)
    yield server.connection
    server.end()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def observer(ledger: RedisClient, clock: Clock) -> PlatformObserver:
    ledger.flushall()
    return PlatformObserver(
        Jobs(ledger),
        Control(ledger),
        Servers(ledger),
        Costs(ledger),
        EventFeed(ledger),
        ledger,
        clock,
    )


def requests(ledger: RedisClient) -> int:
    """Return how many requests the ledger has received; a pipeline is about one."""
    return int(ledger.info("stats")["total_reads_processed"])


def messages(blocks: Iterable[bytes]) -> list[tuple[str, dict[str, Any]]]:
    """Return the kinds and the data of encoded messages."""
    lines = b"".join(blocks).decode().split("\r\n")
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return list(zip(kinds, data, strict=True))


def changes_since(
    observer: PlatformObserver, before: PlatformState, clock: Clock
) -> list[tuple[str, dict[str, Any]]]:
    clock.now += 1
    found = observer.changes.after(before.version, observer.observe().version)
    assert found is not None
    return messages(block for change in found for block in change.blocks)


def test_observation_takes_few_round_trips_and_readers_share_it(
    ledger: RedisClient, observer: PlatformObserver, clock: Clock
) -> None:
    jobs, cost = Jobs(ledger), {}
    for count in (2, 18):
        for _ in range(count):
            jobs.submit(job_spec(), PACKAGE)
        clock.now += 10
        before = requests(ledger)
        state, opening = observer.opening()
        assert observer.observe() is state
        assert observer.opening()[1] is opening
        cost[count] = requests(ledger) - before
        assert len(state.pieces) == len(state.jobs) + 2
    assert cost[18] <= cost[2] + 3


def test_only_what_changed_is_sent(
    ledger: RedisClient, observer: PlatformObserver, clock: Clock
) -> None:
    jobs, control = Jobs(ledger), Control(ledger)
    _, second = (jobs.submit(job_spec(), PACKAGE).id for _ in range(2))
    rows = {f"i-{number}": {"pool": "p", "state": "running"} for number in range(500)}
    control.publish(rows, {})
    before, opening = observer.opening()
    first = [data for kind, data in messages(opening) if kind == "machines"]
    assert [len(each["changed"]) for each in first] == [200, 200, 100]
    assert [each["whole"] for each in first] == [True, False, False]
    assert changes_since(observer, before, clock) == []

    jobs.cancel(second)
    control.update({"i-7": {"pool": "p", "state": "leaving"}}, ["i-8"], None)

    found = dict(changes_since(observer, before, clock))
    assert found.keys() - {"event"} == {"job", "machines", "fleet"}
    assert (found["job"]["id"], found["job"]["state"]) == (second, "cancelled")
    assert [row["id"] for row in found["machines"]["changed"]] == ["i-7"]
    assert (found["machines"]["whole"], found["machines"]["removed"]) == (False, ["i-8"])
    assert found["fleet"]["machines"] == 499


def test_readers_share_events(
    ledger: RedisClient, observer: PlatformObserver, clock: Clock
) -> None:
    jobs = Jobs(ledger)
    job = jobs.submit(job_spec(), PACKAGE).id
    seen = []
    for number in range(3):
        state = observer.observe()
        jobs.event(job, "count", str(number))
        # An observation has the events of earlier milliseconds
        sent = EventFeed(ledger).now()
        while observer.observe().at <= sent:
            clock.now += 1
        seen += [data["text"] for kind, data in changes_since(observer, state, clock)
                 if kind == "event" and data["kind"] == "count"]  # fmt: skip
    assert seen == ["0", "1", "2"]


def test_overview_reads_jobs_that_ended_long_ago_once(
    ledger: RedisClient, observer: PlatformObserver
) -> None:
    jobs = Jobs(ledger)
    names = [jobs.submit(job_spec(), PACKAGE).id for _ in range(60)]
    for name in names[:-1]:
        jobs.transition(name, JobState.CANCELLED, [JobState.STARTING], why="", ended_at=1.0)
    observer.observe()
    cost = []
    for _ in range(2):
        before = requests(ledger)
        assert [each.id for each in observer.overview(100)] == names[::-1]
        cost.append(requests(ledger) - before)
    assert cost[1] <= 4 < cost[0]


# -- readers -------------------------------------------------------------------------------------


def change(version: int, *numbers: int, size: int = 1) -> StateChange:
    events = tuple((EventCursor(number), b"%d" % number) for number in numbers)
    return StateChange(version, EventCursor(numbers[0] - 1), (b"." * size,), events)


def test_reader_gets_the_changes_that_it_lacks() -> None:
    changes = Changes()
    for version in range(1, 4):
        changes.add(change(version, 10 * version, 10 * version + 1))

    assert [each.version for each in changes.after(1, 3) or ()] == [2, 3]
    assert [each.version for each in changes.after(1, 2) or ()] == [2]
    assert changes.after(3, 3) == []
    (last,) = changes.after(2, 3) or ()
    assert last.after(EventCursor(5)) is last.blocks == (b".3031",)
    assert last.after(EventCursor(30)) == (b".31",)
    assert last.after(EventCursor(40)) == (b".",)


def test_reader_far_behind_needs_the_whole_state() -> None:
    changes = Changes()
    for version in range(1, MAX_CHANGES + 3):
        changes.add(change(version, version))
    assert changes.after(1, MAX_CHANGES + 2) is None
    assert changes.after(2, MAX_CHANGES + 2) is not None
    changes.add(replace(change(MAX_CHANGES + 3, 99), events=None))
    assert changes.after(MAX_CHANGES + 2, MAX_CHANGES + 3) is None, "it lacks events"


def test_kept_changes_are_bounded_in_bytes() -> None:
    changes = Changes()
    for version in range(1, 4):
        changes.add(change(version, version, size=MAX_BYTES // 2))
    assert changes.after(2, 3) is not None
    assert changes.after(1, 3) is None


def test_blocks_have_whole_messages_and_a_bounded_size() -> None:
    found = packed([b"a" * (BLOCK_BYTES // 2)] * 3 + [b"b" * (2 * BLOCK_BYTES)])
    assert [len(each) for each in found] == [BLOCK_BYTES, BLOCK_BYTES // 2, 2 * BLOCK_BYTES]
