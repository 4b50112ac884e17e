"""The simulation of slow exchanges in ``benchmarks/learning``, against an ordinary loop."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "learning"
MODULES = ("long_rounds", "copies", "columns", "plain", "order", "rows")
#: A part of the job that takes less than a second.
LENGTH = 0.1


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """Return the benchmark's modules, which are scripts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
        for name in MODULES:
            del sys.modules[name]


def last(outcome: Any) -> tuple[float, float]:
    """Return the clock and the loss at the end of a run."""
    _, clock, _, loss = outcome.points[-1]
    return clock, loss


@pytest.mark.parametrize("fragments", [1, pytest.param(3, marks=pytest.mark.ci)])
def test_rounds_of_one_step_are_plain_training(modules: Any, fragments: int) -> None:
    # With one worker, nothing is exchanged.
    run = modules.copies.Run("svm", 0, 1, length=LENGTH)
    _, plain = last(modules.long_rounds.execute(run))
    run = modules.copies.Run("svm", 0, 4, length=LENGTH, fragments=fragments)
    clock, loss = last(modules.long_rounds.execute(run))
    assert loss == pytest.approx(plain, rel=1e-3)
    assert clock == modules.long_rounds.job_steps(
        modules.columns.make_task(modules.columns.job_fields("svm"), FOLDER), run
    )


@pytest.mark.ci
@pytest.mark.parametrize(("overlap", "share"), [(False, 0.5), (True, 1.0)])
def test_time_counts_waits(modules: Any, overlap: bool, share: float) -> None:
    run = modules.copies.Run(
        "svm", 0, 4, length=LENGTH, steps=4, exchange=4, overlap=overlap, codec="int2"
    )
    outcome = modules.long_rounds.execute(run)
    assert 1 - outcome.waited / outcome.clock == pytest.approx(share, abs=0.01)
    assert last(outcome)[1] < 2.5
