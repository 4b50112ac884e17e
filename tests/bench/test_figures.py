"""What a measurement counts with."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcasgd.bench.copies import copies, copies_per_update
from vcasgd.bench.gauges import Gauge
from vcasgd.bench.tally import DELAYS, Tally


def test_a_tally_is_seen_from_another_mapping(tmp_path: Path) -> None:
    # Given a tally that one process writes
    written = Tally(tmp_path / "tally", create=True)
    assert (tmp_path / "tally").stat().st_size == Tally.SIZE
    seen = Tally(tmp_path / "tally")
    assert (seen.fetched, seen.applied, seen.baseline) == (0, 0, 0)

    # When it counts
    written.note_baseline(5)
    written.note_fetched(0.25)
    for seconds in (0.5, 0.25, 0.125):
        written.note_applied(seconds)

    # Then the other one sees it
    assert (seen.fetched, seen.applied, seen.baseline) == (0.25, 3, 5)
    assert seen.delays(since=1).tolist() == [0.25, 0.125]
    assert seen.delays(since=3).tolist() == []


def test_a_tally_forgets_the_oldest_delays(tmp_path: Path) -> None:
    tally = Tally(tmp_path / "tally", create=True)

    for number in range(DELAYS + 2):
        tally.note_applied(float(number))

    delays = tally.delays(since=0)
    assert (len(delays), delays[0], delays[-1]) == (DELAYS, 2.0, DELAYS + 1.0)
    assert (tmp_path / "tally").stat().st_size == Tally.SIZE


def test_the_slope_is_that_of_the_second_half() -> None:
    # Given memory that grows at first, and by 10 bytes a second later
    samples = [(float(at), 1000 * at) for at in range(10)]
    samples += [(10.0 + at, 9000 + 10 * at) for at in range(10)]

    gauge = Gauge(pid=1, baseline=0, samples=samples)

    assert gauge.slope() == pytest.approx(10.0)
    assert (gauge.smallest, gauge.largest) == (0, 9090)


def test_one_sample_has_no_slope() -> None:
    assert Gauge(pid=1, baseline=0, samples=[(0.0, 5)]).slope() == 0.0


def test_an_encoding_that_shares_memory_saves_copies() -> None:
    assert copies_per_update("float32") < copies_per_update("bfloat16")
    assert {stage for stage, _ in copies("float32")} >= {"push", "publish", "fetch"}
