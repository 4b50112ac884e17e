"""``vcasgd simulate``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vcasgd.cli.commands import app

JOB = str(Path(__file__).parents[2] / "examples" / "digits" / "job.yaml")
SHORT = ["--set", "epochs=1", "--set", "subtasks_per_epoch=15", "--set", "update.rule=vc-asgd"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.ci
def test_simulate_trains_a_job_on_machines_of_one_speed_or_several() -> None:
    result, other = (
        CliRunner().invoke(app, ["simulate", JOB, *SHORT, "--json", *arguments])
        for arguments in ([], ["--speed-range", "4"])
    )

    assert (result.exit_code, other.exit_code) == (0, 0), result.stderr + other.stderr
    outcome = json.loads(result.stdout)
    assert json.loads(other.stdout)["seconds"] != outcome["seconds"]
    assert outcome["updates"] == 15
    assert 1 < outcome["staleness_mean"] <= 4
    assert outcome["machines_lost"] == 0
    assert outcome["points"][-1]["metrics"]["accuracy"] > 0.5
    assert result.stderr.startswith("epoch 1 ")


def test_simulate_follows_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [4, 2, 3, 0, 4] * 9}))
    arguments = ["--trace", str(trace), "--faster", "3000", "--boot-seconds", "0.01"]
    arguments += ["--price-per-hour", "36000"]

    result = CliRunner().invoke(app, ["simulate", JOB, *SHORT, *arguments])

    assert result.exit_code == 0, result.stderr
    assert re.search(r"samples  loss [0-9.]+, accuracy [0-9.]+%$", result.stderr.splitlines()[-1])
    facts = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert int(facts["machines lost"]) > 0
    assert float(facts["cost"].removesuffix(" USD")) > 0
    assert facts["updates"].strip().startswith("15,")


@pytest.mark.parametrize(
    ("words", "named"),
    [(("--set", "update.codec=x"), "update.codec"), (("--faster", "10"), "--faster")],
)
def test_simulate_names_an_invalid_field(words: tuple[str, ...], named: str) -> None:
    result = CliRunner().invoke(app, ["simulate", JOB, *words])

    assert result.exit_code == 1
    assert named in result.stderr


def test_divergence_is_shown() -> None:
    result = CliRunner().invoke(
        app, ["simulate", JOB, *SHORT, "--set", "args.learning_rate=1.0e+30"]
    )

    assert result.exit_code == 0, result.stderr
    assert "diverged" in result.stdout
