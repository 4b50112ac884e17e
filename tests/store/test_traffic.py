"""The bytes that a job's workers moved, summed over present and removed workers."""

from __future__ import annotations

from support.world import World

from vcasgd.store.ledger.heartbeats import LARGEST_COUNT
from vcasgd.store.ledger.traffic import Traffic
from vcasgd.store.ledger.worker_beats import WorkerBeats

#: Largest integer that the server can increment.
LARGEST_INTEGER = 2**63 - 1


def traffic(world: World) -> Traffic:
    return WorkerBeats(world.ledger).traffic(world.job)


def test_traffic_is_the_sum_of_present_and_removed_workers(world: World) -> None:
    world.leases("a").renew({"pushed_bytes": 10, "fetched_bytes": 300}, [])
    world.leases("b").renew({"pushed_bytes": 5, "fetched_bytes": 70}, [])
    assert traffic(world) == Traffic(15, 370)

    world.jobs.workers.remove(world.job, "a")
    world.jobs.workers.remove(world.job, "a")
    assert traffic(world) == Traffic(15, 370)

    # A worker that restarts under the same name counts from 0.
    world.leases("a").renew({"pushed_bytes": 1, "fetched_bytes": 30}, [])
    assert traffic(world) == Traffic(16, 400)


def test_traffic_of_an_older_worker_counts_what_it_reports(world: World) -> None:
    world.leases("a").renew({"pushed_bytes": 10}, [])
    world.jobs.workers.remove(world.job, "a")

    assert traffic(world) == Traffic(10, 0)


def test_traffic_of_hostile_workers_is_parsed_and_never_overflows(world: World) -> None:
    world.ledger.hset(world.ledger_keys.traffic, "pushed_bytes", LARGEST_INTEGER)
    world.leases("a").renew({"pushed_bytes": LARGEST_COUNT, "fetched_bytes": -1}, [])
    world.jobs.workers.remove(world.job, "a")
    world.leases("b").renew({"pushed_bytes": "many", "fetched_bytes": LARGEST_COUNT + 1}, [])

    assert traffic(world) == Traffic(LARGEST_INTEGER + LARGEST_COUNT, 0)


def test_traffic_of_jobs_without_workers_is_zero(world: World) -> None:
    assert traffic(world) == WorkerBeats(world.ledger).traffic("unknown") == Traffic()
