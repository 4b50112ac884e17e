"""Goodput while machines are lost: figures of invented runs, and of runs with real faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measure.goodput import GoodputFigures, MachineLife, Observations
from benchmarks.measure.goodput_run import GoodputOptions, measure_goodput
from vcasgd.settings import Settings


def run_with_a_loss() -> Observations:
    """Two machines that train 10 samples per second each; one is lost at 120 and replaced."""
    machines = {
        "a": MachineLife(90.0, 95.0, 96.0),
        "b": MachineLife(90.0, 95.0, 96.0, ended=120.0),
        "c": MachineLife(121.0, 124.0, 125.0),
    }
    progress = [(float(at), 20 * (at - 95)) for at in range(95, 121)]
    progress += [(float(at), 500 + 10 * (at - 120)) for at in range(123, 125)]
    progress += [(float(at), 540 + 20 * (at - 124)) for at in range(125, 131)]
    return Observations(machines, progress, losses=[120.0])


def test_goodput_compares_with_the_same_machine_seconds_without_faults() -> None:
    figures = GoodputFigures.of(
        run_with_a_loss(),
        quiet=(100.0, 110.0),
        faulty=(110.0, 130.0),
        wasted={"booting": 3.04},
        pace=12.5,
    )

    # 20 + 10 + 6 machine-seconds, in which 360 samples are possible, and 3 to boot
    assert (figures.quiet_samples_per_s, figures.faulty_samples_per_s) == (20.0, 18.0)
    assert figures.goodput == pytest.approx(1.0)
    assert figures.goodput_with_boot == pytest.approx(360 / 390, abs=1e-4)
    assert figures.share_of_pace == pytest.approx(0.8)
    assert (figures.losses, figures.replaced_s, figures.longest_pause_s) == (1, [5.0], 3.0)
    assert figures.wasted_s == {"booting": 3.0}


@pytest.mark.extended
@pytest.mark.parametrize("notice", [None, 4.0])
def test_a_run_loses_a_machine_and_nothing_else(notice: float | None, tmp_path: Path) -> None:
    options = GoodputOptions(
        workers=2, seconds=20.0, quiet_seconds=5.0, evict_every=10.0, notice=notice
    )

    figures = measure_goodput(options, Settings(home=tmp_path), print)

    assert figures.losses == 1
    assert figures.goodput > 0
    assert figures.samples_lost == figures.samples_repeated == 0
