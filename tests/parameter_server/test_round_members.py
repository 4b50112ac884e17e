"""When a round ends, and what its members share."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, islice
from typing import Any

import pytest

from vcasgd.learning.local_batch import LocalBatch
from vcasgd.parameter_server.round_members import (
    GRACE_INTERVALS,
    MAX_GRACE,
    MAX_MISSED,
    MIN_GRACE,
    RoundMembers,
)
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import RoundFacts

INTERVAL = 2.0


def header(worker: str = "w", samples: int = 960, **fields: Any) -> Header:
    return Header(
        **{"update": "u", "worker": worker, "subtask": 0, "start": 0, "stop": samples, "base": 0,
           "token": 0, "codec": "float32", "size": 4, "layout": "", **fields}
    )  # fmt: skip


def arrive(members: RoundMembers, present: Mapping[str, Header], now: float = 0.0) -> None:
    for worker, update in present.items():
        members.arrive(update.model_copy(update={"worker": worker}), now)


def after(*rounds: Mapping[str, Header]) -> RoundMembers:
    """Return the members after rounds."""
    members = RoundMembers()
    for present in rounds:
        arrive(members, present)
        members.end()
    return members


def during(present: Mapping[str, Header], *rounds: Mapping[str, Header]) -> RoundMembers:
    """Return the members in a round after others."""
    members = after(*rounds)
    arrive(members, present)
    return members


def trained(worker: str, seconds: float = INTERVAL) -> Header:
    """Return the header of an update that took so long."""
    return header(worker, batch=960.0, step_seconds=seconds)


def after_a_round_of(*workers: str) -> RoundMembers:
    return after({worker: trained(worker) for worker in workers})


def test_a_lost_worker_costs_one_interval_once() -> None:
    members = after_a_round_of("a", "b")
    members.arrive(trained("a"), 10.0)

    assert members.deadline == 10.0 + GRACE_INTERVALS * INTERVAL
    assert not members.complete(10.0 + INTERVAL)
    assert members.complete(13.0)
    members.end()
    members.arrive(trained("a"), 14.0)

    assert members.complete(14.0)


def test_a_worker_that_is_known_to_be_lost_costs_nothing() -> None:
    members = after_a_round_of("a", "b")
    members.arrive(trained("a"), 10.0)
    assert not members.complete(10.1)

    members.lose({"b", "c"})

    assert members.complete(10.1)
    # It was alive after all.
    members.arrive(trained("b"), 10.2)
    members.end()
    members.arrive(trained("a"), 12.0)
    assert not members.complete(12.1)


def test_a_late_worker_is_expected_again() -> None:
    members = after_a_round_of("a", "b")
    members.arrive(trained("a"), 10.0)
    members.end()
    members.arrive(trained("b"), 12.5)
    assert not members.complete(12.6)
    members.arrive(trained("a"), 13.0)
    assert members.complete(13.0)
    members.end()

    members.arrive(trained("a"), 15.0)

    assert not members.complete(15.1)


def test_the_first_round_waits_for_whoever_comes() -> None:
    members = RoundMembers()
    members.arrive(trained("a"), 0.0)

    assert not members.complete(INTERVAL / 2)
    assert members.complete(GRACE_INTERVALS * INTERVAL)


def test_the_others_are_in_the_round_of_one_that_just_missed_theirs() -> None:
    # Given a round that ended just before a new worker's update
    members = after_a_round_of("a", "b")
    members.arrive(trained("c"), 10.0)

    # When the others push the next time, an interval and a moment later
    later = 10.0 + INTERVAL + 0.05
    assert not members.complete(later)
    assert members.waiting_seconds(later) == pytest.approx(INTERVAL + 0.05)
    members.arrive(trained("a"), later)
    members.arrive(trained("b"), later)

    # Then all three are in one round
    assert members.complete(later)
    assert members.waiting_seconds(later) == 0.0


@pytest.mark.parametrize(
    ("seconds", "grace"), [(0.0, MIN_GRACE), (1.0, GRACE_INTERVALS), (1e9, MAX_GRACE)]
)
def test_the_wait_is_bounded(seconds: float, grace: float) -> None:
    members = after_a_round_of("a", "b")

    members.arrive(trained("a", seconds), 100.0)

    assert members.deadline == 100.0 + grace


def test_an_empty_round_ends_nothing() -> None:
    members = after_a_round_of("a", "b")

    members.end()

    assert members.deadline is None
    assert members.complete(0.0)
    members.arrive(trained("a"), 1.0)
    assert not members.complete(1.0)


# -- what members share ---------------------------------------------------------------------

BOTH = {"a": header(batch=8.0), "b": header(batch=24.0)}
ALONE = {"a": header(batch=8.0)}
MISSED = [ALONE] * MAX_MISSED


@pytest.mark.parametrize(
    ("rounds", "present", "workers", "batch"),
    [
        ([BOTH], {}, 0, 0.0),
        # one step of 40 samples instead of 1.25, and two of 24 instead of 1.5
        ([], {"a": header(batch=32.0, samples=40), "b": header(batch=32.0, samples=48)}, 2, 64.0),
        ([BOTH], ALONE, 2, 32.0),
        ([BOTH], {"b": header(batch=16.0)}, 2, 24.0),
        ([BOTH, *MISSED[1:]], ALONE, 2, 32.0),
        ([BOTH, *MISSED], ALONE, 1, 8.0),
        ([BOTH, *MISSED, BOTH, *MISSED[1:]], ALONE, 2, 32.0),
    ],
    ids=["no updates", "as made", "late", "its last update", "missed", "missed too often", "back"],
)
def test_a_late_worker_keeps_its_part_of_the_batch_for_some_rounds(
    rounds: list[dict[str, Header]], present: dict[str, Header], workers: int, batch: float
) -> None:
    assert during(present, *rounds).facts() == RoundFacts(workers=workers, batch=batch)


def test_lost_workers_are_forgotten_at_once() -> None:
    members = during(ALONE, BOTH)

    members.lose(["b", "unknown"])

    assert members.facts() == RoundFacts(workers=1, batch=8.0)


@pytest.mark.parametrize(
    ("rounds", "present", "share"),
    [
        ([], {"a": header(batch=0.0)}, 1.0),
        ([BOTH], BOTH, 1.0),
        ([BOTH], ALONE, 0.25),
        ([BOTH], {**BOTH, "c": header(batch=8.0)}, 1.0),
        ([BOTH], {"a": header(batch=0.0)}, 0.0),
        ([BOTH], {}, 1.0),
    ],
    ids=["first round", "all", "one of two", "another one", "without a batch", "none"],
)
def test_share_of_the_batch(
    rounds: list[dict[str, Header]], present: dict[str, Header], share: float
) -> None:
    assert during(present, *rounds).share() == share


@pytest.mark.parametrize(("in_turn", "complete"), [(False, True), (True, False)])
def test_a_worker_that_missed_a_turn_is_expected_in_the_next_one(
    in_turn: bool, complete: bool
) -> None:
    members = RoundMembers(in_turn=in_turn)
    for present in (BOTH, ALONE):
        arrive(members, present)
        members.end()

    arrive(members, ALONE)

    assert members.complete(0.0) is complete
    assert members.complete(MAX_GRACE)
    members.lose(["b"])
    assert members.complete(0.0)


class AdaptiveMembers:
    """Rounds of a job whose members adapt their batches: seconds of a sample, by member."""

    def __init__(self, job_batch: int, **seconds: float) -> None:
        self.seconds = seconds
        self.batches = {name: LocalBatch(job_batch, len(seconds)) for name in seconds}
        self.members = RoundMembers()
        self.versions = count(1)

    def make_rounds(self, number: int, **others: Header) -> None:
        for version in islice(self.versions, number):
            present = {name: self._header(name) for name in self.seconds} | others
            arrive(self.members, present)
            facts = self.members.facts()
            self.members.end()
            for batch in self.batches.values():
                batch.follow(version, facts.workers, facts.batch, facts.step_seconds)

    def _header(self, name: str) -> Header:
        batch = self.batches[name]
        batch.measure(batch.size * self.seconds[name])
        return header(
            batch=batch.size, step_seconds=batch.step_seconds, samples=round(10 * batch.size)
        )

    @property
    def samples(self) -> float:
        """Samples in a step of all members."""
        return sum(batch.size for batch in self.batches.values())


@pytest.mark.parametrize(
    "claim",
    [
        header(batch=1e9, step_seconds=1.0, samples=40),
        header(batch=1e9, step_seconds=1e-9, samples=40),
        header(batch=64.0, step_seconds=1e-9, samples=40),
        header(batch=1e-9, step_seconds=1e-9, samples=40),
        header(batch=1e-9, step_seconds=1e9, samples=40),
        header(batch=1e-320, step_seconds=1e9, samples=40),
        header(batch=1e-320, step_seconds=1e-320, samples=40),
    ],
    ids=[
        "batch",
        "batch and speed",
        "speed",
        "small batch and speed",
        "slowness",
        "hardly a batch",
        "hardly a batch or a step",
    ],
)
@pytest.mark.parametrize("honest", ["a", "abc"], ids=["one", "three"])
def test_a_member_that_lies_leaves_most_of_the_batch_to_the_others(
    claim: Header, honest: str
) -> None:
    members = AdaptiveMembers(256, **dict.fromkeys(honest, 0.01))
    members.make_rounds(20)

    for _ in range(200):
        members.make_rounds(1, liar=claim)
        assert 256 / 4 <= members.samples <= 256 * 4


def test_a_member_that_lies_and_is_late_does_not_shrink_the_step() -> None:
    liar = {"liar": header(batch=1e9, samples=40)}
    honest = {name: header(batch=64.0, samples=640) for name in "abc"}

    assert during(honest, honest | liar).share() >= 0.8


def test_a_machine_that_is_much_faster_gets_its_part() -> None:
    members = AdaptiveMembers(8192, a=1.0, b=1.0, fast=0.01)

    members.make_rounds(40)

    assert members.samples == pytest.approx(8192, rel=0.01)
    assert members.batches["fast"].size / members.batches["a"].size == pytest.approx(100, rel=0.2)
