"""Counters and gauges of a measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measure.gauges import Gauge
from benchmarks.measure.tally import DELAYS, Tally


def test_tally_is_shared_between_mappings(tmp_path: Path) -> None:
    # Given a tally that one process writes
    writer = Tally(tmp_path / "tally", create=True)
    assert (tmp_path / "tally").stat().st_size == Tally.SIZE
    reader = Tally(tmp_path / "tally")
    assert (reader.fetched, reader.applied, reader.baseline) == (0, 0, 0)

    # When it counts
    writer.note_baseline(5)
    writer.note_fetched(0.25)
    for seconds in (0.5, 0.25, 0.125):
        writer.note_applied(seconds)

    # Then the other mapping has the same values
    assert (reader.fetched, reader.applied, reader.baseline) == (0.25, 3, 5)
    assert reader.delays(since=1).tolist() == [0.25, 0.125]
    assert reader.delays(since=3).tolist() == []


def test_tally_drops_the_oldest_delays(tmp_path: Path) -> None:
    tally = Tally(tmp_path / "tally", create=True)

    for number in range(DELAYS + 2):
        tally.note_applied(float(number))

    delays = tally.delays(since=0)
    assert (len(delays), delays[0], delays[-1]) == (DELAYS, 2.0, DELAYS + 1.0)
    assert (tmp_path / "tally").stat().st_size == Tally.SIZE


def test_slope_uses_the_second_half_of_the_samples() -> None:
    # Given memory that grows at first, and by 10 bytes a second later
    samples = [(float(at), 1000 * at) for at in range(10)]
    samples += [(10.0 + at, 9000 + 10 * at) for at in range(10)]

    gauge = Gauge(pid=1, baseline=0, samples=samples)

    assert gauge.slope() == pytest.approx(10.0)
    assert (gauge.smallest, gauge.largest) == (0, 9090)


def test_slope_of_one_sample_is_zero() -> None:
    assert Gauge(pid=1, baseline=0, samples=[(0.0, 5)]).slope() == 0.0
