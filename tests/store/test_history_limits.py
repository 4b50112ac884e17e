"""Histories of jobs stay within their limits, and the ledger's memory with them."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from support.world import World, spec_of

from vcasgd.errors import StoreError
from vcasgd.store.keys import LedgerKeys
from vcasgd.store.ledger.events import EventCursor, EventFeed, NewEvent
from vcasgd.store.ledger.history_limits import (
    ENDED_SECONDS,
    SLACK,
    HistoryKeeper,
    HistoryLimits,
)
from vcasgd.store.ledger.metrics import MetricColumns

LIMITS = HistoryLimits(points=2000, events=1000, log_lines=500, ended_share=0.1)
MANY = 5000
SPIKE = 1234


def fill(world: World, job: str) -> None:
    """Write more of each kind than may stay, with one spike in the loss."""
    jobs = world.jobs
    with world.ledger.pipeline() as pipe:
        for number in range(MANY):
            loss = 99 if number == SPIKE else 1
            text = f'{{"at": {number}, "loss": {loss}, "padding": "{"x" * 300}"}}'
            pipe.xadd(LedgerKeys(job).metrics, {"m": text}, id=f"{1 + 1000 * number}-0")
        pipe.execute()
    for first in range(0, MANY, 1000):
        jobs.add_logs(job, "w", [f"{number} {'x' * 100}" for number in range(first, first + 1000)])
    jobs.add_events([NewEvent(job, "note", str(number), {}) for number in range(2 * LIMITS.events)])


def memory(world: World, job: str) -> dict[str, int]:
    keys = LedgerKeys(job)
    streams = {"points": keys.metrics, "events": keys.events, "lines": keys.logs}
    return {n: int(world.ledger.memory_usage(key, samples=0)) for n, key in streams.items()}


def ended(world: World, job: str, seconds: float) -> None:
    world.jobs.cancel(job)
    world.ledger.hset(LedgerKeys(job).record, "ended_at", str(time.time() - seconds))


def test_memory_shrinks_and_readers_continue(world: World) -> None:
    # Given a job with too much of everything, and readers who know the first part of it
    job, keeper = world.job, HistoryKeeper(world.ledger, LIMITS)
    fill(world, job)
    columns = MetricColumns(world.ledger, job, ("loss",))
    columns.refresh()
    known_point = world.jobs.metrics(job, limit=1001)[-1]
    known_event = world.jobs.events(job, limit=11)[-1]
    known_line = world.jobs.logs(job, limit=11)[-1]
    before = memory(world, job)

    # When the limits are enforced
    keeper.enforce()

    # Then memory shrinks with the number of entries
    after = memory(world, job)
    assert all(after[kind] < 0.6 * before[kind] for kind in before), (before, after)
    assert not world.ledger.exists(LedgerKeys(job).thinned)
    # The newest points all stay, and of the others the first, the spike, and some from all times
    points = world.jobs.metrics(job)
    assert 500 < len(points) <= LIMITS.points / 2
    newest = LIMITS.points // 4
    assert [each["at"] for each in points[-newest:]] == list(range(MANY - newest, MANY))
    assert points[0]["at"] == 0
    assert SPIKE in {each["at"] for each in points if each["loss"] == 99}
    old = [each["at"] for each in points[:-newest]]
    assert max(b - a for a, b in pairwise(old)) < 4 * MANY / newest * 2
    # And readers continue from where they were
    continued = world.jobs.metrics(job, known_point["id"])
    assert continued[0]["at"] > known_point["at"]
    assert continued == [each for each in points if each["at"] > known_point["at"]]
    columns.refresh()
    assert len(columns) == len(points)
    assert world.jobs.events(job, known_event["id"], limit=5000)[-1]["text"] == str(
        2 * LIMITS.events - 1
    )
    assert len(world.jobs.events(job, known_event["id"], limit=5000)) == LIMITS.events
    assert len(world.jobs.logs(job, known_line["id"], limit=5000)) == LIMITS.log_lines
    feed = EventFeed(world.ledger)
    position = EventCursor.parse(f"{known_event['id']}/{job}")
    assert len(feed.events([job], position, feed.now() + 1, limit=5000)) == LIMITS.events

    # And nothing changes until there is too much again
    length = world.ledger.xlen(LedgerKeys(job).metrics)
    for number in range(SLACK):
        world.jobs.add_metrics(job, {"at": float(MANY + number)})
        world.jobs.event(job, "note", "more")
    keeper.enforce()
    assert world.ledger.xlen(LedgerKeys(job).metrics) == length + SLACK
    assert world.ledger.xlen(LedgerKeys(job).events) == LIMITS.events + SLACK


def test_job_that_has_ended_keeps_less_after_a_while(world: World) -> None:
    job = world.jobs.submit(spec_of(), "0" * 64).id
    fill(world, job)
    keeper = HistoryKeeper(world.ledger, LIMITS)
    ended(world, job, ENDED_SECONDS / 2)
    keeper.enforce()
    assert world.ledger.xlen(LedgerKeys(job).metrics) == MANY

    ended_long_ago = time.time() - 2 * ENDED_SECONDS
    world.ledger.hset(LedgerKeys(job).record, "ended_at", str(ended_long_ago))
    keeper.enforce()
    points = world.jobs.metrics(job)
    assert len(points) <= 200
    assert {0, SPIKE, MANY - 1} <= {each["at"] for each in points}
    assert world.ledger.xlen(LedgerKeys(job).events) == 100
    assert world.ledger.xlen(LedgerKeys(job).logs) == 50
    assert sum(memory(world, job).values()) < 200_000

    # It costs nothing from then on
    before = world.ledger.info("commandstats")["cmdstat_xlen"]["calls"]
    keeper.enforce()
    # Three for the other job, which runs
    assert world.ledger.info("commandstats")["cmdstat_xlen"]["calls"] == before + 3


def test_points_that_come_during_thinning_stay(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, keeper = world.job, HistoryKeeper(world.ledger, LIMITS)
    fill(world, job)
    script = keeper._thin

    def late(keys: list[str], args: list[str]) -> object:
        if args[0] == "replace":
            world.jobs.add_metrics(job, {"at": 1e9})
        return script(keys=keys, args=args)

    monkeypatch.setattr(keeper, "_thin", late)
    keeper.enforce()
    assert world.jobs.metrics(job)[-1]["at"] == 1e9

    # A job that is deleted meanwhile does not come back
    def deleted(keys: list[str], args: list[str]) -> object:
        if args[0] == "replace":
            world.ledger.unlink(*LedgerKeys(job).all)
        return script(keys=keys, args=args)

    monkeypatch.setattr(keeper, "_thin", deleted)
    assert keeper.thin(job, 200, 0.0) is False
    assert not world.ledger.exists(LedgerKeys(job).metrics, LedgerKeys(job).thinned)


def test_a_full_ledger_can_be_trimmed(world: World) -> None:
    job = world.job
    fill(world, job)
    used = world.ledger.info("memory")["used_memory"]
    world.ledger.config_set("maxmemory", used - 100_000)
    try:
        HistoryKeeper(world.ledger, LIMITS).enforce()
    finally:
        world.ledger.config_set("maxmemory", 0)
    assert world.ledger.xlen(LedgerKeys(job).metrics) <= LIMITS.points / 2


def test_broken_times_stop_nothing(world: World) -> None:
    job = world.jobs.submit(spec_of(), "0" * 64).id
    ended(world, job, 2 * ENDED_SECONDS)
    world.ledger.hset(LedgerKeys(job).record, "ended_at", "soon")
    fill(world, world.job)
    HistoryKeeper(world.ledger, LIMITS).enforce()
    assert world.ledger.xlen(LedgerKeys(world.job).metrics) <= LIMITS.points / 2


def test_a_log_that_takes_no_line_is_deleted(world: World) -> None:
    # Given a worker that gave a line the largest ID
    key, keeper = LedgerKeys(world.job).logs, HistoryKeeper(world.ledger, LIMITS)
    world.jobs.add_logs(world.job, "w", ["before"])
    keeper.enforce()
    assert world.ledger.xlen(key) == 1
    world.ledger.xadd(key, {"l": "{}"}, id=f"{2**64 - 1}-{2**64 - 1}", maxlen=0)
    with pytest.raises(StoreError, match="exhausted"):
        world.jobs.add_logs(world.job, "w", ["refused"])

    # When the limits are enforced
    keeper.enforce()

    # Then there is a log again
    world.jobs.add_logs(world.job, "w", ["after"])
    assert [each["line"] for each in world.jobs.logs(world.job)] == ["after"]
