"""``benchmarks/race``: faults, and figures of a run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = ("faults", "outcomes")


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the modules of the benchmark, which are scripts."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.syspath_prepend(str(FOLDER / "race"))
    loaded: dict[str, ModuleType] = {name: importlib.import_module(name) for name in MODULES}
    yield SimpleNamespace(**loaded)
    for name in MODULES:
        del sys.modules[name]


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "seconds", "times", "at_once"),
    [
        ("quiet", 60.0, [], 0),
        ("kill", 60.0, [15.0, 30.0, 45.0], 1),
        ("kill", 22.0, [], 0),
        ("notice", 23.0, [15.0], 1),
        ("bulk", 90.0, [30.0, 60.0], 3),
        ("slow", 60.0, [0.0], 1),
        ("coordinator", 60.0, [30.0], 1),
    ],
)
def test_faults_happen_at_fixed_times(
    race: Any, column: str, seconds: float, times: list[float], at_once: int
) -> None:
    events = race.faults.schedule(race.faults.COLUMNS[column], seconds, 4, 0)

    assert [event.at for event in events] == times
    assert {event.machines for event in events} == ({at_once} if times else set())


# -- figures of a run --------------------------------------------------------------------------


def lines(first_step: float, *commits: tuple[float, int]) -> list[dict[str, Any]]:
    return [
        {"at": first_step, "kind": "step"},
        *({"at": at, "kind": "commit", "total": total} for at, total in commits),
    ]


def seen_with_a_loss(race: Any, **more: Any) -> Any:
    """Two machines of 10 samples per second; one ends at 110, and its replacement steps at 115."""
    commits = [(float(at), 20 * (at - 95)) for at in range(95, 111)]
    commits += [(float(at), 300 + 10 * (at - 110)) for at in range(111, 121)]
    observations = race.outcomes.observe(
        {"a": 90.0, "b": 90.0, "c": 111.0},
        {"b": 110.0},
        {"a": lines(95.0, *commits), "b": lines(95.0, commits[0]), "c": lines(115.0, (116.0, 360))},
    )
    return race.outcomes.Seen(observations, (100.0, 120.0), **more)


def test_figures_of_a_run(race: Any) -> None:
    accuracies = [(101.0, 0.9), (109.0, 0.986), (120.0, 0.984)]
    seen = seen_with_a_loss(
        race, began=95.0, accuracies=accuracies, faults=1, carried_bytes=1000, others=5.0
    )

    row = race.outcomes.figures(seen, race.outcomes.Workload(batch=1, pace_ms=100.0))

    assert row["ended"] == "ok"
    assert row["samples_per_s"] == 15.0
    # 20 + 10 + 5 machine-seconds since the first steps, and 4 to boot
    assert row["share"] == pytest.approx(300 / 350, abs=1e-4)
    assert row["share_with_boot"] == pytest.approx(300 / 390, abs=1e-4)
    assert (row["target_s"], row["accuracy"]) == (14.0, 0.984)
    assert (row["replaced_s"], row["longest_pause_s"]) == ([6.0], 1.0)
    assert (row["faults"], row["bytes_per_s"], row["others"]) == (1, 50, 0.25)
    assert row["curve"][-1] == [20.0, 300]


def test_a_run_without_progress_at_its_end_hangs(race: Any) -> None:
    seen = seen_with_a_loss(race)
    seen.window = (100.0, 150.0)

    row = race.outcomes.figures(seen, race.outcomes.Workload(batch=1, pace_ms=100.0))

    assert row["ended"] == "hung"


def test_a_model_that_goes_back_to_a_checkpoint_loses_samples(race: Any) -> None:
    observations = race.outcomes.observe(
        {"a": 0.0},
        {},
        {"a": lines(0.0, (1.0, 100), (2.0, 200), (3.0, 100), (4.0, 300))},
    )

    assert observations.samples(1.0, 4.0) == 200
    assert observations.samples(2.0, 3.0) == -100
