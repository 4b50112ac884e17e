"""The report that ``make bench`` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the modules ``report`` and ``contenders``, which are scripts."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import contenders
    import report

    yield report, contenders
    for name in ("report", "contenders"):
        del sys.modules[name]


def run_of_ours(updates_per_s: float) -> dict[str, Any]:
    process = {
        "baseline_mb": 250.0,
        "resident_max_mb": 400.0,
        "resident_max_models": 2.1,
        "cpu_seconds": 3.0,
    }
    details = dict.fromkeys(
        ("exchanged_gb_per_s", "loopback_gb_per_s", "wire_fraction", "loopback_model_gb_per_s",
         "wire_fraction_model", "publishes_per_s", "fetches_per_s", "p50_push_to_applied_ms",
         "p99_push_to_applied_ms", "tensors_peak_mb"), 1.0,
    )  # fmt: skip
    return {
        **details,
        "updates_per_s": updates_per_s,
        "loopback_bytes_per_update": 2.0 * (16 << 20),
        "seconds": 6.0,
        "server": "valkey",
        "server_version": "9.1",
        "processes": {"server": process},
    }


def test_report_contains_medians_ratios_and_errors(modules: Any, tmp_path: Path) -> None:
    report, contenders = modules
    # Given three runs of ours, two of Ray's, and a peer that could not be installed
    peer = {"loopback_bytes_per_update": 0.0, "versions": {"ray": "2.60.0"}}
    results = {
        "vcasgd-float32": {16: [run_of_ours(rate) for rate in (30.0, 90.0, 60.0)]},
        "ray": {16: [{**peer, "updates_per_s": 20.0}, {"error": "broke"}]},
        "torchft": {16: [{"error": "no wheel for this machine"}]},
    }

    # When the results are written
    report.write(
        tmp_path / "store",
        report.Report(
            facts={"cores": "2"},
            started_at=0.0,
            minutes=1.0,
            command="run.py",
            contenders=[one for one in contenders.CONTENDERS if one.name in results],
            results=results,
        ),
    )

    # Then the document has the medians, the ranges, the ratios, and the errors
    text = (tmp_path / "store.md").read_text()
    assert "| vcasgd, float32 | 60.00 | 30.00 – 90.00 (3) | 1.00 × | 2.00 |" in text
    assert "| Ray actor, a node each | 20.00 | 20.00 – 20.00 (1 of 2) | 3.00 × | 0.00 |" in text
    assert "| torchft all-reduce | – |  |  |  | no wheel for this machine |" in text
    # And the JSON file has every run
    assert json.loads((tmp_path / "store.json").read_text())["results"]["ray"]["16"][0] == {
        **peer,
        "updates_per_s": 20.0,
    }


def test_every_peer_has_a_script_and_pinned_requirements(modules: Any) -> None:
    _, contenders = modules
    peers = [one for one in contenders.CONTENDERS if one.environment]

    assert len({one.environment for one in peers}) == 4
    for one in peers:
        assert (contenders.PEERS / one.script).is_file()
        assert all("==" in line for line in one.requirements.read_text().splitlines())
