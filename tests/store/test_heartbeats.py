"""Heartbeats are parsed strictly, because a hostile worker may write anything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vcasgd.store.ledger.untrusted import (
    LARGEST_COUNT,
    MAX_COUNTERS,
    MAX_NAME_LENGTH,
    MAX_STATUS_LENGTH,
    Heartbeat,
)


def parsed(**fields: Any) -> Heartbeat:
    heartbeat = Heartbeat.parse(json.dumps(fields).encode())
    assert heartbeat is not None
    return heartbeat


def test_a_heartbeat_survives_the_ledger() -> None:
    heartbeat = Heartbeat(
        at=5.5, machine="i-1", pid=3, steps=7, step_seconds=0.1, notice="terminate",
        notice_at=9.0, leaving="drain", reading={"hits": 3, "seconds": 0.5},
    )  # fmt: skip

    assert Heartbeat.parse(json.dumps(heartbeat.to_json()).encode()) == heartbeat


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"5", b"null", b"{", b"\xff", b"[" * 100_000, b'{"at": ' + b"9" * 5000]
)
def test_a_heartbeat_that_is_no_object_is_none(text: bytes) -> None:
    assert Heartbeat.parse(text) is None


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
