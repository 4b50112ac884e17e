"""The cut of a vector into shards, and the intervals trained for each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vcasgd.learning.shards import Cut, PushInterval, next_interval, shards_for


@pytest.mark.parametrize(
    ("floats", "parameters", "shards", "expected"),
    [
        (10, 10, 1, [(0, 10, 10)]),
        (10, 8, 3, [(0, 3, 3), (3, 6, 3), (6, 10, 2)]),
        (10, 2, 3, [(0, 3, 2), (3, 6, 0), (6, 10, 0)]),
        (3, 3, 3, [(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
        (0, 0, 1, [(0, 0, 0)]),
    ],
)
def test_parts_of_a_cut(
    floats: int, parameters: int, shards: int, expected: list[tuple[int, int, int]]
) -> None:
    parts = Cut(floats, parameters, shards).parts

    assert [(part.start, part.stop, part.parameters) for part in parts] == expected
    assert [part.shard for part in parts] == list(range(shards))


@given(floats=st.integers(1, 200), statistics=st.integers(0, 50), nodes=st.integers(1, 12))
def test_parts_cover_the_vector_and_differ_by_at_most_one(
    floats: int, statistics: int, nodes: int
) -> None:
    parameters = max(0, floats - statistics)
    cut = Cut(floats, parameters, shards_for(nodes, floats))
    vector = torch.arange(floats)

    assert torch.cat([part.of(vector) for part in cut.parts]).tolist() == vector.tolist()
    sizes = [part.floats for part in cut.parts]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert sum(part.parameters for part in cut.parts) == parameters


@pytest.mark.parametrize(
    ("nodes", "floats", "in_turn", "expected"),
    [
        (1, 31_000_000, False, 1),
        (1, 4_000_000, True, 1),
        (1, 5_000_000, True, 2),
        (1, 31_000_000, True, 15),
        (1, 1_000_000_000, True, 32),
        (3, 31_000_000, True, 15),
        (5, 3, True, 3),
    ],
)
def test_a_long_vector_has_several_shards_on_each_node_if_workers_push_in_turn(
    nodes: int, floats: int, in_turn: bool, expected: int
) -> None:
    assert shards_for(nodes, floats, in_turn=in_turn) == expected


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([0, 0, 0], PushInterval(0, 20, (0, 1, 2))),
        ([40, 0, 40], PushInterval(0, 20, (1,))),
        ([20, 0, 35], PushInterval(0, 20, (1,))),
        ([20, 20, 35], PushInterval(20, 35, (0, 1))),
        ([100, 90, 100], PushInterval(90, 100, (1,))),
        ([100, 100, 100], None),
        ([7], PushInterval(7, 27, (0,))),
    ],
)
def test_the_next_interval(positions: list[int], expected: PushInterval | None) -> None:
    assert next_interval(positions, 100, lambda start: start + 20) == expected


@given(data=st.data(), size=st.integers(1, 60), interval=st.integers(1, 25))
def test_each_shard_gets_each_sample_it_lacks_once(
    data: st.DataObject, size: int, interval: int
) -> None:
    """Holds for all initial positions, and if an interval is cut short anywhere."""
    positions = data.draw(st.lists(st.integers(0, size), min_size=1, max_size=5))
    before = list(positions)
    got: list[list[int]] = [[] for _ in positions]
    steps = 0
    while (found := next_interval(positions, size, lambda start: start + interval)) is not None:
        stop = data.draw(
            st.integers(found.start + 1, found.stop)
        )  # a notice can end the interval early
        for shard in found.shards:
            assert positions[shard] == found.start
            got[shard] += range(found.start, stop)
            positions[shard] = stop
        steps += 1
        assert steps <= size

    assert got == [list(range(start, size)) for start in before]


@given(positions=st.lists(st.integers(0, 50), min_size=1, max_size=5), interval=st.integers(1, 20))
def test_shards_at_the_same_position_stay_together(positions: list[int], interval: int) -> None:
    """So catching up for one shard costs no more intervals than that shard lacks."""
    lacking = -(-(50 - min(positions)) // interval) + len(set(positions))
    steps = 0
    while (found := next_interval(positions, 50, lambda start: start + interval)) is not None:
        together = len(set(positions))
        for shard in found.shards:
            positions[shard] = found.stop
        assert len(set(positions)) <= together
        steps += 1
    assert steps <= lacking
