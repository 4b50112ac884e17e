"""Heartbeats of workers, parsed strictly, and the bytes that they moved, as the ledger has them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.world import World

from vcasgd.limits import MAX_HEARTBEAT_BYTES
from vcasgd.schemas.base import MAX_NAME_LENGTH
from vcasgd.schemas.fleet import MAX_COUNTERS, MAX_STATUS_LENGTH
from vcasgd.schemas.jobs import TrafficView
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.store.ledger.workers import WorkerBeats, read_beats


def parsed(**fields: Any) -> Heartbeat:
    heartbeat = Heartbeat.parse(json.dumps(fields).encode())
    assert heartbeat is not None
    return heartbeat


def test_a_heartbeat_survives_the_ledger() -> None:
    heartbeat = Heartbeat(
        at=5.5, machine="i-1", pid=3, steps=7, step_seconds=0.1, notice="terminate",
        notice_at=9.0, leaving="drain", reading={"hits": 3, "seconds": 0.5},
    )  # fmt: skip

    assert Heartbeat.parse(heartbeat.model_dump_json().encode()) == heartbeat


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"5", b"null", b"{", b"\xff", b"[" * 100_000, b'{"at": ' + b"9" * 5000]
)
def test_a_heartbeat_that_is_no_object_is_none(text: bytes) -> None:
    assert Heartbeat.parse(text) is None


#: Largest integer that every parser of JSON reads exactly.
LARGEST_COUNT = 2**53 - 1
NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("steps", ["3", -1, 2.5, True, LARGEST_COUNT + 1, [], {}, NAN]),
        ("at", ["3", -1, True, 1e300, [], {}, NAN, INFINITE, -INFINITE]),
        ("machine", [3, [], "x" * (MAX_NAME_LENGTH + 1)]),
        ("reading", [3, {"a": "b"}, {"a": NAN}, {str(n): 0 for n in range(MAX_COUNTERS + 1)}]),
    ],
)
def test_an_invalid_value_is_none(field: str, values: list[Any]) -> None:
    for value in values:
        assert parsed(**{field: value, "pid": 5}) == Heartbeat(pid=5), value


def test_long_text_is_cut() -> None:
    assert parsed(leaving="x" * 10_000).leaving == "x" * MAX_STATUS_LENGTH


#: Largest integer that the server can increment.
LARGEST_INTEGER = 2**63 - 1


def renew(world: World, worker: str, **fields: object) -> None:
    world.leases(worker).renew({"at": 1.0, **fields}, [])


def test_beats_are_those_in_the_ledger(world: World) -> None:
    beats = WorkerBeats(world.ledger)
    renew(world, "a", samples=1)
    renew(world, "b", samples=2)
    first = beats.of(world.job)
    assert first == {"a": Heartbeat(at=1.0, samples=1), "b": Heartbeat(at=1.0, samples=2)}

    # Only what has changed is parsed again
    renew(world, "a", samples=3)
    second = beats.of(world.job)
    assert second["a"].samples == 3
    assert second["b"] is first["b"]

    world.jobs.workers.remove(world.job, "b")
    assert beats.of_many([world.job, "other"]) == {
        world.job: {"a": Heartbeat(at=1.0, samples=3)},
        "other": {},
    }


def test_hostile_names_and_heartbeats_are_left_out(world: World) -> None:
    long = b'{"doing": "' + b"x" * MAX_HEARTBEAT_BYTES + b'"}'
    rows = {"": "{}", "no name": "{}", "*" * 200: "{}", b"\xff": "", "b": "{", "c": "{}",
            "d": long, "e": "[]"}  # fmt: skip
    world.ledger.hset(world.ledger_keys.workers, mapping=rows)

    assert WorkerBeats(world.ledger).of(world.job) == {"c": Heartbeat()}
    asked = [(world.job, "c"), (world.job, "b"), ("other", "c")]
    assert read_beats(world.ledger, asked) == {(world.job, "c"): Heartbeat()}


def test_traffic_of_hostile_workers_is_parsed_and_never_overflows(world: World) -> None:
    world.ledger.hset(world.ledger_keys.traffic, "pushed_bytes", LARGEST_INTEGER)
    renew(world, "a", pushed_bytes=LARGEST_COUNT, fetched_bytes=-1)
    world.jobs.workers.remove(world.job, "a")
    renew(world, "b", pushed_bytes="many", fetched_bytes=LARGEST_COUNT + 1)

    traffic = WorkerBeats(world.ledger).traffic(world.job)
    assert traffic == TrafficView(pushed_bytes=LARGEST_INTEGER + LARGEST_COUNT)
