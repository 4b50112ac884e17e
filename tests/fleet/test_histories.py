"""Lifetimes of simulated machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vcasgd.errors import SpecError
from vcasgd.fleet.histories import Life, always, lives, read_counts


def test_lives_match_the_counts() -> None:
    counts = [4, 4, 1, 0, 3, 2]

    machines = lives(counts, 10.0, seed=1)

    for nth, count in enumerate(counts):
        alive = [life for life in machines if life.start <= nth * 10 < life.stop]
        assert len(alive) == count
    assert max(life.stop for life in machines) == 60


def test_lives_depend_only_on_the_seed() -> None:
    counts = [5, 3, 5, 1, 5, 2]

    assert lives(counts, 1.0, seed=1) == lives(counts, 1.0, seed=1)
    assert len({tuple(lives(counts, 1.0, seed)) for seed in range(20)}) > 1


def test_always_never_evicts() -> None:
    assert len(always(3)) == 3
    assert all(life.start == 0 and life.stop == float("inf") for life in always(3))


def test_read_counts_caps_the_number_of_machines(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [16, 2, 0]}))

    assert read_counts(path, most=4) == ([4, 2, 0], 300.0)


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        "[]",
        '{"data": [1]}',
        '{"metadata": {"gap_seconds": 0}, "data": [1]}',
        '{"metadata": {"gap_seconds": 1}, "data": [0, 0]}',
        '{"metadata": {"gap_seconds": 1}, "data": []}',
    ],
)
def test_read_counts_refuses_invalid_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)

    with pytest.raises(SpecError, match=r"^trace: "):
        read_counts(path, most=4)


@pytest.mark.parametrize(
    ("counts", "bought"),
    [
        # Refused at 10 s: asked again at 11, 13, 17, 25 s, and then every 8 s.
        ([2, 0, 0, 2, 2], 33.0),
        ([2, 0, 2, 2, 2], 25.0),
        # Bought at 41 s, lost at 50 s, and refused from then on.
        ([2, 0, 0, 0, 2, 0, 0, 0, 2, 2], 81.0),
    ],
)
def test_machines_are_bought_at_the_next_attempt(counts: list[int], bought: float) -> None:
    machines = lives(counts, 10.0, seed=1, retry=(1.0, 8.0))

    assert machines[:2] == [Life(0.0, 10.0)] * 2
    assert [life for life in machines[2:] if life.stop == 10.0 * len(counts)] == (
        [Life(bought, 10.0 * len(counts))] * 2
    )
