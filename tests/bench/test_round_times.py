"""``benchmarks/profile/rounds.py``: where the time of a round goes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "profile"


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the benchmark, which is a script."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("rounds")
    for name in ("rounds", "exchange", "timed.timed", "timed"):
        del sys.modules[name]


def lines(rounds: Any, committed: int, late: float = 0.0) -> list[str]:
    """Return a worker's marks after a commit at so many milliseconds, 10 ms apart."""
    order = [rounds.NEWS, *(each for each in rounds.MARKS if each != rounds.NEWS)]
    return [
        f"{committed / 1000 + 0.01 * (nth + 1) + late:.6f} {mark} "
        + (str(committed) if mark == rounds.NEWS else "")
        for nth, mark in enumerate(order)
    ]


def test_the_parts_of_the_last_worker_add_up_to_a_round(rounds: Any) -> None:
    # A commit every 200 ms; the second worker is 5 ms later. The last round has no end yet.
    recorded = [
        [line for at in (1000, 1200, 1400) for line in lines(rounds, at, late)]
        for late in (0.0, 0.005)
    ]
    turns = [turn for each in recorded for turn in rounds.turns_of(each)]

    head, _, _, _, *rows = rounds.table(turns)

    assert head == "2 rounds of 2 workers, milliseconds"
    assert rows[0] == "| the news and the model reach the worker | 14.50 | 12.00 |"
    assert rows[-2] == "| wait for others; blend and commit | 115.50 | 118.00 |"
    assert rows[-1] == "| **sum** | **200.00** | **200.00** |"


def test_a_wait_without_a_new_version_is_no_round(rounds: Any) -> None:
    recorded = [*lines(rounds, 1000), f"1.150000 {rounds.NEWS} 1000", *lines(rounds, 1200)]

    (turn,) = rounds.turns_of(recorded)

    assert turn.next_commit == pytest.approx(1.2005)
    assert turn.marks[rounds.NEWS] == 1.01


def test_a_turn_without_all_marks_is_left_out(rounds: Any) -> None:
    recorded = [*lines(rounds, 1000)[:-1], *lines(rounds, 1200)]

    assert list(rounds.turns_of(recorded)) == []


@pytest.mark.slow
@pytest.mark.extended
def test_rounds_of_real_workers_are_measured() -> None:
    command = [sys.executable, FOLDER / "rounds.py", "--workers", "2", "--seconds", "3"]

    done = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)

    head, _, _, _, *rows = done.stdout.splitlines()
    assert head.endswith(" rounds of 2 workers, milliseconds")
    milliseconds = [float(row.split(" | ")[1]) for row in rows[:-1]]
    assert all(each >= 0 for each in milliseconds)
    assert sum(milliseconds) > 80
