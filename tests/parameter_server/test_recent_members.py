"""Members of a round, present and missing."""

from __future__ import annotations

import pytest

from vcasgd.parameter_server.recent_members import MOST_MISSED, RecentMembers
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import RoundFacts


def header(batch: float, step_seconds: float = 0.0, exchange_seconds: float = 0.0) -> Header:
    return Header(
        update="u",
        worker="w",
        subtask=0,
        start=0,
        stop=1,
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
    missed = [ALONE] * MOST_MISSED

    assert after(BOTH, *missed[1:]).facts(ALONE).workers == 2
    assert after(BOTH, *missed).facts(ALONE) == RoundFacts(workers=1, batch=8.0)


def test_a_worker_that_returns_counts_again() -> None:
    missed = [ALONE] * MOST_MISSED

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
