"""Answers of pools and markets in the ledger: back-off, quotas, and failed boots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.fleet_records import NOW, machine

from vcasgd.controller.fleet.cloud_calls import BACKOFF_SECONDS, QUOTA_SECONDS, LaunchHistory
from vcasgd.errors import (
    CloudDenied,
    CloudUnavailable,
    FleetError,
    NoCapacity,
    QuotaExceeded,
    Throttled,
)
from vcasgd.fleet.plan import Blame, Launch
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.control import Control

LAUNCH = Launch("east", 2, "token", "a", ("small",), True, ("A",))

NewHistory = Callable[[], LaunchHistory]


@pytest.fixture
def history(ledger: RedisClient) -> NewHistory:
    """The history as a new controller reads it, at each call."""

    def new() -> LaunchHistory:
        launches = LaunchHistory(Control(ledger))
        launches.load(NOW)
        return launches

    return new


def test_no_capacity_blocks_one_zone_for_longer_each_time(history: NewHistory) -> None:
    first, _ = BACKOFF_SECONDS
    for count in range(3):
        history().refused(LAUNCH, NoCapacity("none left"), 0, NOW)
        market = history().markets("east", NOW)["a", True]
        assert market.blocked_until == NOW + first * 2**count
        assert (market.launches, market.refused_since) == (count + 1, NOW)

    assert history().pool("east").blocked_until == 0.0
    assert history().reasons("east", NOW) == ["a (spot): none left"]
    assert history().reasons("east", NOW + 10) == []
    history().granted(LAUNCH)
    assert history().markets("east", NOW)["a", True].refused_since is None


def test_no_pool_stays_blocked_by_a_clock_that_was_far_ahead(history: NewHistory) -> None:
    history().refused(LAUNCH, QuotaExceeded("quota"), 3, NOW + 10 * QUOTA_SECONDS)
    history().refused(LAUNCH, CloudDenied("no permission"), 0, NOW + 10 * QUOTA_SECONDS)

    assert history().pool("east").blocked_until <= NOW
    assert (history().reasons("east", NOW), history().quotas("east", NOW)) == ([], {})
    assert history().pool("east").failures == 1


def test_a_zone_may_have_any_name(history: NewHistory) -> None:
    history().refused(replace(LAUNCH, zone="eu/north"), NoCapacity("none left"), 0, NOW)

    assert history().markets("east", NOW)["eu/north", True].launches == 1


def test_quota_caps_the_pool_at_its_present_machines_and_half_of_a_launch(
    history: NewHistory,
) -> None:
    history().refused(replace(LAUNCH, count=3), QuotaExceeded("too many"), 5, NOW)
    assert history().quotas("east", NOW) == {True: 6}
    history().refused(replace(LAUNCH, count=1), QuotaExceeded("too many"), 5, NOW)

    assert history().quotas("east", NOW) == {True: 5}
    assert history().quotas("east", NOW + QUOTA_SECONDS) == {}
    reason = "quota: the account may have 5 such machines: too many"
    assert reason in history().reasons("east", NOW)


@pytest.mark.parametrize("error", [CloudUnavailable("down"), Throttled("slowly")])
def test_launch_that_may_have_happened_keeps_its_token(
    history: NewHistory, error: FleetError
) -> None:
    history().refused(LAUNCH, error, 0, NOW)

    assert history().markets("east", NOW) == {}
    assert history().pool("east").blocked_until > NOW


def test_denied_launch_blocks_the_whole_pool(history: NewHistory) -> None:
    history().refused(LAUNCH, CloudDenied("no key"), 0, NOW)

    assert history().pool("east").reason == "no key"
    assert history().markets("east", NOW)["a", True].launches == 1


def test_failed_boots_block_the_market_until_a_machine_joins(history: NewHistory) -> None:
    blame = Blame("m-1", "east", "a", True, "did not join in time")
    waits = []
    for _ in range(2):
        history().boot_failed(blame, NOW)
        history().granted(LAUNCH)
        history().boot_failed(blame, NOW)
        waits.append(history().markets("east", NOW)["a", True].blocked_until - NOW)

    assert waits == [120, 480], "a granted launch does not reset the count"
    history().granted(LAUNCH)
    assert history().markets("east", NOW)["a", True].blocked_until == NOW + 480, "nor the wait"
    history().boot_failed(blame, NOW, BACKOFF_SECONDS)
    assert history().markets("east", NOW)["a", True].blocked_until - NOW == 16
    history().joined([machine("m-0", NOW - 1)])
    assert history().markets("east", NOW)["a", True].refused_since == NOW
    history().joined([machine("m-2", NOW + 1)])
    assert history().markets("east", NOW)["a", True].refused_since is None
