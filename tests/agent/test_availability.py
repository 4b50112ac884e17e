"""Times at which a machine takes part, and the tokens that people paste."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from vcasgd.agent import availability as availability_module
from vcasgd.agent.availability import Availability, Hours, StackSilence, parse_until
from vcasgd.agent.connection import GatewayAddress, JoinToken
from vcasgd.errors import SpecError

NOON = datetime(2026, 3, 14, 12, 0, tzinfo=UTC)


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that sets this machine's time zone, which is UTC at first."""

    def set_zone(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    set_zone("UTC")
    yield set_zone
    monkeypatch.undo()
    time.tzset()


def at(hour: float, day: int = 14) -> datetime:
    return datetime(2026, 3, day, tzinfo=UTC) + timedelta(hours=hour)


@pytest.mark.parametrize(
    ("text", "now", "start", "end"),
    [
        ("22-6", NOON, at(22), at(6, 15)),
        ("22-6", at(23), at(23), at(6, 15)),
        ("22-6", at(5.5), at(5.5), at(6)),
        ("22-6", at(6), at(22), at(6, 15)),
        ("9-17", NOON, NOON, at(17)),
        ("9-17", at(18), at(9, 15), at(17, 15)),
        ("22:30-6:15", at(22.25), at(22.5), at(6.25, 15)),
        ("0-24", NOON, None, None),
        ("20-24", at(21), at(21), at(24)),
    ],
)
def test_hours_can_contain_midnight(
    text: str, now: datetime, start: datetime | None, end: datetime | None
) -> None:
    if start is None:
        with pytest.raises(SpecError):
            Hours.parse(text)
        return
    hours = Hours.parse(text)
    assert (hours.next_start(now), hours.next_end(hours.next_start(now))) == (start, end)


@pytest.mark.parametrize(
    ("text", "now", "start", "end"),
    [
        # In Central Europe, 02:00 was followed by 03:00 at 01:00 UTC on 29 March 2026.
        ("22-6", "2026-03-28T20:00", "2026-03-28T21:00", "2026-03-29T04:00"),
        ("22-6", "2026-03-28T23:00", "2026-03-28T23:00", "2026-03-29T04:00"),
        ("5-6", "2026-03-28T20:00", "2026-03-29T03:00", "2026-03-29T04:00"),
        ("22-2:30", "2026-03-28T23:00", "2026-03-28T23:00", "2026-03-29T01:00"),
        # And 03:00 by 02:00 at 01:00 UTC on 25 October.
        ("22-6", "2026-10-24T22:00", "2026-10-24T22:00", "2026-10-25T05:00"),
        ("22-2:30", "2026-10-25T01:10", "2026-10-25T01:10", "2026-10-25T01:30"),
    ],
)
def test_hours_follow_the_local_clock_in_a_night_in_which_it_is_changed(
    zone: Callable[[str], None], text: str, now: str, start: str, end: str
) -> None:
    zone("CET-1CEST,M3.5.0,M10.5.0/3")
    asked, begins, ends = (datetime.fromisoformat(f"{each}+00:00") for each in (now, start, end))
    hours = Hours.parse(text)

    assert hours.next_start(asked.astimezone()) == begins
    assert hours.next_end(begins.astimezone()) == ends
    if text.endswith("-6"):
        assert parse_until("06:00", asked.astimezone()) == ends


@pytest.mark.parametrize("text", ["", "22", "25-6", "22-6-7", "22:75-6", "6-6", "a-b"])
def test_other_hours_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="must have the form 22-6"):
        Hours.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("13:30", at(13.5)),
        ("07:30", at(7.5, 15)),
        ("12:00", at(12, 15)),
        ("8h", at(20)),
        ("90m", at(13.5)),
        ("2026-03-15T01:00+00:00", at(1, 15)),
    ],
)
def test_an_end_is_a_time_or_a_duration(text: str, expected: datetime) -> None:
    assert parse_until(text, NOON) == expected


@pytest.mark.parametrize("text", ["", "25:00", "soon", "-1h", "2026-03-13T00:00+00:00"])
def test_other_ends_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_until(text, NOON)


def test_the_first_of_both_ends_counts() -> None:
    night = Hours.parse("22-6")
    assert Availability(None, None).end(NOON) is None
    assert Availability(at(23), night).end(at(22)) == at(23)
    assert Availability(at(30), night).end(at(22)) == at(6, 15)
    # it would only take part again after its end
    assert Availability(at(20), night).over(NOON)
    assert not Availability(at(23), night).over(NOON)


def test_a_token_is_taken_apart_and_not_shown() -> None:
    text = f"vcasgd_ann_{'0' * 64}"
    assert JoinToken.parse(f" {text}.{'a' * 64}\n") == JoinToken(text, "a" * 64)
    assert JoinToken.parse(text) == JoinToken(text)
    assert text not in repr(JoinToken.parse(text))
    with pytest.raises(SpecError, match="copy it again"):
        JoinToken.parse(f"{text}.{'a' * 63}")


@pytest.mark.parametrize("url", ["http://host:1", "https://", "https://host:99999", "ftp://x"])
def test_only_https_is_accepted(url: str) -> None:
    with pytest.raises(SpecError):
        GatewayAddress.of(url, None)


def test_silence_is_too_long_only_after_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e6
    monkeypatch.setattr(availability_module, "time", SimpleNamespace(monotonic=lambda: now))
    silences = [StackSilence.parse("1h"), StackSilence.parse(None)]
    for _ in range(61):
        assert [each.too_long() for each in silences] == [False, False]
        now += 60
    assert [each.too_long() for each in silences] == [True, False]
    silences[0].broken()
    assert not silences[0].too_long()

    # A machine that was frozen, or paused by its schedule, for longer than that asks again first
    now += 8 * 3600
    assert not silences[0].too_long()
    with pytest.raises(SpecError, match="not a duration"):
        StackSilence.parse("soon")
