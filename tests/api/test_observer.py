"""One observation of the platform serves all readers, however many jobs and readers there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fleet_records import PACKAGE, job_spec
from support.harness import RedisServer

from vcasgd.api.observer import PlatformObserver, PlatformState, changed
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.costs import Costs
from vcasgd.store.ledger.events import EventCursor, EventFeed
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


def test_observation_takes_few_round_trips_and_readers_share_it(
    ledger: RedisClient, observer: PlatformObserver, clock: Clock
) -> None:
    jobs, cost = Jobs(ledger), {}
    for count in (2, 18):
        for _ in range(count):
            jobs.submit(job_spec(), PACKAGE)
        clock.now += 10
        before = requests(ledger)
        state = observer.observe()
        assert observer.observe() is state is observer.fresh()
        cost[count] = requests(ledger) - before
        assert len(state.pieces) == len(state.jobs) + 2
    assert cost[18] <= cost[2] + 3

    clock.now += 10
    assert observer.fresh() is None


def test_pieces_that_did_not_change_are_the_same_objects(
    ledger: RedisClient, observer: PlatformObserver, clock: Clock
) -> None:
    jobs = Jobs(ledger)
    first, second = (jobs.submit(job_spec(), PACKAGE).id for _ in range(2))
    before = observer.observe()
    jobs.cancel(second)
    clock.now += 10
    after = observer.observe()

    assert changed(before.pieces, after.pieces).keys() == {("job", second)}
    assert after.pieces["job", first] is before.pieces["job", first]
    assert '"cancelled"' in after.pieces["job", second].text


def test_readers_share_events(
    ledger: RedisClient, observer: PlatformObserver, clock: Clock
) -> None:
    jobs = Jobs(ledger)
    job = jobs.submit(job_spec(), PACKAGE).id
    start = EventCursor(observer.observe().at)
    seen = []
    for number in range(3):
        jobs.event(job, "count", str(number))
        # An observation has the events of earlier milliseconds
        sent = EventFeed(ledger).now()
        while (state := observer.observe()).at <= sent:
            clock.now += 1
        events = state.events_after(start)
        assert events
        seen.append([text for _, text in events])
        assert state.events_after(events[-1][0]) == ()
    assert [len(each) for each in seen] == [1, 2, 3]
    assert all('"count"' in text for text in seen[-1])


def test_events_before_the_kept_ones_are_not_known() -> None:
    cursors = [EventCursor(ms, 0, "a") for ms in (10, 12, 15)]
    state = PlatformState({}, ("a",), 20, tuple((each, "") for each in cursors), 10)
    assert state.events_after(EventCursor(9, 5, "z")) is None
    assert state.events_after(EventCursor(10)) == state.events
    assert state.events_after(cursors[1]) == state.events[2:]
    assert state.events_after(EventCursor(19)) == ()
