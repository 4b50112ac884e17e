"""``benchmarks/soak.py``: its faults, and how it finds what grows or is left."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vcasgd.chaos.scenario import schedule

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("soak")
    for name in ("soak", "machine", "markdown"):
        del sys.modules[name]


def test_no_part_has_two_faults_at_a_time(soak: Any) -> None:
    plan = [each for each in schedule(soak.scenario(11), 3) if each.where not in ("worker", "pool")]

    for place in {each.where for each in plan}:
        faults = [each for each in plan if each.where == place]
        ends = [each.end for each in faults]
        assert all(end + 10 < later.at for end, later in zip(ends, faults[1:], strict=False))


@pytest.mark.parametrize(
    ("growth", "message"),
    [
        ({}, None),
        ({"memory": 10**6}, "it: 230 MB became 290 MB"),
        ({"descriptors": 1}, "it: 130 descriptors became 190"),
    ],
)
def test_what_grows_is_a_leak(
    soak: Any,
    growth: dict[str, int],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = soak.Sampler()
    sampler.home = tmp_path / "home"
    monkeypatch.setattr(soak, "PROCESSES", ("it",))
    steady = {"memory": 200 * 10**6, "descriptors": 100}
    for nth in range(101):
        use = {name: base + growth.get(name, 0) * nth for name, base in steady.items()}
        sampler.samples["it"].append(soak.Sample(at=5.0 * nth, process=1, **use))

    found = soak.leaks(sampler)

    assert found == ([message] if message else [])
