"""Members of a round, present and missing."""

from __future__ import annotations

from itertools import count, islice

import pytest

from vcasgd.learning.local_batch import LocalBatch
from vcasgd.parameter_server.recent_members import MAX_MISSED, RecentMembers
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import RoundFacts


def header(
    batch: float, step_seconds: float = 0.0, exchange_seconds: float = 0.0, samples: int = 1000
) -> Header:
    return Header(
        update="u",
        worker="w",
        subtask=0,
        start=0,
        stop=samples,
        base=0,
        token=0,
        codec="float32",
        size=4,
        layout="",
        integers="",
        loss_sum=0.0,
        batch=batch,
        step_seconds=step_seconds,
        exchange_seconds=exchange_seconds,
    )


def after(*rounds: dict[str, Header]) -> RecentMembers:
    recent = RecentMembers()
    for present in rounds:
        recent.end(present)
    return recent


BOTH = {"a": header(8.0), "b": header(24.0)}
ALONE = {"a": header(8.0)}


def test_facts_of_a_round() -> None:
    present = {"a": header(8.0, 0.1, 0.05), "b": header(24.0, 0.3, 0.02), "c": header(0.0)}

    facts = RecentMembers().facts(present)

    # Of the measured ones, each trains 80 samples in a second.
    assert facts == RoundFacts(3, 32.0, pytest.approx(0.2), 0.02)


def test_one_slow_member_changes_the_step_only_by_the_speed_that_it_lacks() -> None:
    present = {name: header(64.0, 0.1) for name in "abc"} | {"d": header(64.0, 0.4)}

    facts = RecentMembers().facts(present)

    # 2080 samples in a second.
    assert facts.step_seconds == pytest.approx(256 / 2080)


def test_a_round_without_updates_has_no_facts() -> None:
    assert after(BOTH).facts({}) == RoundFacts()


def test_a_late_worker_keeps_its_part_of_the_batch() -> None:
    assert after(BOTH).facts(ALONE) == RoundFacts(workers=2, batch=32.0)


def test_its_last_update_counts() -> None:
    recent = after(BOTH)

    assert recent.facts({"b": header(16.0)}) == RoundFacts(workers=2, batch=24.0)


def test_a_worker_that_stays_away_counts_no_longer() -> None:
    missed = [ALONE] * MAX_MISSED

    assert after(BOTH, *missed[1:]).facts(ALONE).workers == 2
    assert after(BOTH, *missed).facts(ALONE) == RoundFacts(workers=1, batch=8.0)


def test_a_worker_that_returns_counts_again() -> None:
    missed = [ALONE] * MAX_MISSED

    assert after(BOTH, *missed, BOTH, *missed[1:]).facts(ALONE).workers == 2


def test_lost_workers_are_forgotten_at_once() -> None:
    recent = after(BOTH)

    recent.lose(["b", "unknown"])

    assert recent.facts(ALONE) == RoundFacts(workers=1, batch=8.0)


@pytest.mark.parametrize(
    ("present", "share"),
    [
        (BOTH, 1.0),
        (ALONE, 0.25),
        ({**BOTH, "c": header(8.0)}, 1.0),
        ({"a": header(0.0)}, 0.0),
        ({}, 1.0),
    ],
)
def test_share_of_the_batch(present: dict[str, Header], share: float) -> None:
    assert after(BOTH).share(present) == share


def test_the_first_round_is_whole() -> None:
    assert RecentMembers().share({"a": header(0.0)}) == 1.0


class Members:
    """Rounds of a job whose members adapt their batches: seconds of a sample, by member."""

    def __init__(self, job_batch: int, **seconds: float) -> None:
        self.seconds = seconds
        self.batches = {name: LocalBatch(job_batch, len(seconds)) for name in seconds}
        self.recent = RecentMembers()
        self.versions = count(1)

    def make_rounds(self, number: int, **others: Header) -> None:
        for version in islice(self.versions, number):
            present = {name: self._header(name) for name in self.seconds} | others
            facts = self.recent.facts(present)
            self.recent.end(present)
            for batch in self.batches.values():
                batch.follow(version, facts.workers, facts.batch, facts.step_seconds)

    def _header(self, name: str) -> Header:
        batch = self.batches[name]
        batch.measure(batch.size * self.seconds[name])
        return header(batch.size, batch.step_seconds, samples=round(10 * batch.size))

    @property
    def samples(self) -> float:
        """Samples in a step of all members."""
        return sum(batch.size for batch in self.batches.values())


@pytest.mark.parametrize(
    "claim",
    [
        header(1e9, 1.0, samples=40),
        header(1e9, 1e-9, samples=40),
        header(64.0, 1e-9, samples=40),
        header(1e-9, 1e-9, samples=40),
        header(1e-9, 1e9, samples=40),
        header(1e-320, 1e9, samples=40),
        header(1e-320, 1e-320, samples=40),
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
    members = Members(256, **dict.fromkeys(honest, 0.01))
    members.make_rounds(20)

    for _ in range(200):
        members.make_rounds(1, liar=claim)
        assert 256 / 4 <= members.samples <= 256 * 4


def test_a_member_that_lies_and_is_late_does_not_shrink_the_step() -> None:
    liar = {"liar": header(1e9, samples=40)}
    honest = {name: header(64.0, samples=640) for name in "abc"}

    assert after(honest | liar).share(honest) >= 0.8


def test_a_machine_that_is_much_faster_gets_its_part() -> None:
    members = Members(8192, a=1.0, b=1.0, fast=0.01)

    members.make_rounds(40)

    assert members.samples == pytest.approx(8192, rel=0.01)
    assert members.batches["fast"].size / members.batches["a"].size == pytest.approx(100, rel=0.2)
