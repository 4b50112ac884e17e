"""Warnings about settings that train badly, and the measurements behind them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from vcasgd.spec.job import JobSpec
from vcasgd.spec.update import LIMIT, LOSSES, RULES, unstable_settings

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "stability.jsonl"
Row = dict[str, Any]


def job(rule: str, workers: int, *, codec: str = "float32", push_every: int = 1) -> JobSpec:
    return JobSpec.parse(
        {
            "name": "job",
            "task": "t:T",
            "epochs": 1,
            "workers": {"max": workers},
            "push_every": push_every,
            "update": {"rule": rule, "codec": codec},
        }
    )


def ratios(
    rule: str, workers: int, codec: str = "float32", push_every: int | None = None
) -> list[float]:
    """Return the measured final losses, as multiples of those of one process."""
    rows: list[Row] = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    plain = {row["task"]: row["loss"] for row in rows if row["rule"] == "plain"}
    return [
        math.inf if row["loss"] is None else row["loss"] / plain[row["task"]]
        for row in rows
        if (row["rule"], row["codec"], row["workers"]) == (rule, codec, workers)
        and push_every in (None, row["push_every"])
    ]


@pytest.mark.parametrize("rule", sorted(map(str, RULES)))
def test_known_losses_are_those_that_were_measured(rule: str) -> None:
    assert LOSSES[rule] == pytest.approx((max(ratios(rule, 1)), max(ratios(rule, 8))), abs=0.006)


def test_the_default_rule_has_no_warning() -> None:
    assert max(LOSSES["rounds"]) <= LIMIT
    assert unstable_settings(job("rounds", 8)) == []


@pytest.mark.parametrize(
    ("rule", "workers", "text"),
    [
        ("async-local-sgd", 4, "async-local-sgd and eight workers ended with up to 18.1 times"),
        ("vc-asgd", 1, "vc-asgd and one worker ended with up to 1.7 times"),
    ],
)
def test_a_warning_names_the_field_and_the_loss(rule: str, workers: int, text: str) -> None:
    (warning,) = unstable_settings(job(rule, workers))

    assert warning.field == "update.rule"
    assert text in warning.message


@pytest.mark.parametrize("codec", ["bfloat16", "int8", "int2", "topk", "rows"])
def test_encodings_that_exceed_the_limit_have_a_warning(codec: str) -> None:
    exceeds = False
    for steps in (1, 4, 16, 64):
        exceeds = exceeds or max(ratios("rounds", 8, codec, steps)) > LIMIT
        found = unstable_settings(job("rounds", 8, codec=codec, push_every=steps))
        assert [each.field for each in found] == ["push_every"] * exceeds, steps
    assert max(ratios("rounds", 4, codec)) <= LIMIT
    assert unstable_settings(job("rounds", 4, codec=codec, push_every=64)) == []
