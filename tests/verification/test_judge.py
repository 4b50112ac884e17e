"""Differences of repeated updates, and what follows for their owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vcasgd.spec.job import JobSpec
from vcasgd.verification.judge import (
    MAX_LEFT,
    MAX_WRONG,
    RepetitionJudge,
    RepetitionOutcome,
    update_difference,
    why_not_repeatable,
)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"update": {"rule": "rounds", "codec": "bfloat16"}}, None),
        ({"update": {"rule": "async-local-sgd"}}, None),
        ({"update": {"rule": "rounds", "codec": "int8"}}, "int8 depend on earlier ones"),
        ({"update": {"rule": "vc-asgd"}}, "vc-asgd are not differences"),
        ({"update": {"rule": "sma"}}, "sma are not differences"),
        ({"tuning": {"momentum": True}, "update": {"rule": "async-local-sgd"}}, "momentum"),
    ],
)
def test_a_job_whose_intervals_depend_on_more_is_named(
    fields: dict[str, Any], reason: str | None
) -> None:
    why = why_not_repeatable(JobSpec.parse({"name": "j", "task": "t:T", "epochs": 1, **fields}))
    assert (why or "").endswith(reason or "") if reason is None else reason in (why or "")


@pytest.mark.parametrize(
    ("sent", "right", "parameters", "difference"),
    [
        ([3.0, 4.0, 0.0, 7.0], [3.0, 4.0, 0.0, 7.0], 3, 0.0),
        ([3.0, 4.0, 1.5, 7.0], [3.0, 4.0, 0.0, 7.0], 3, 0.3),
        ([-3.0, -4.0, 0.0, 7.0], [3.0, 4.0, 0.0, 7.0], 3, 2.0),
        # A statistic that changes from 5 to 7 by rights.
        ([3.0, 4.0, 0.0, 7.2], [3.0, 4.0, 0.0, 7.0], 3, 0.1),
        # One that changes by less than its encoding loses.
        ([3.0, 4.0, 0.0, 5.025], [3.0, 4.0, 0.0, 5.0], 3, 0.1),
        # Steps of a learning rate of almost 0 are rounding.
        ([1e-9, 0.0, 0.0, 5.0], [0.0, 1e-9, 0.0, 5.0], 3, 1e-9 * 2**0.5 / 1e-4),
        ([float("nan"), 4.0, 0.0, 7.0], [3.0, 4.0, 0.0, 7.0], 3, float("nan")),
        # A model without statistics.
        ([2.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0], 4, 1.0),
    ],
)
def test_the_difference_is_relative_to_the_right_change(
    sent: list[float], right: list[float], parameters: int, difference: float
) -> None:
    base = torch.tensor([1.0, 0.0, 0.0, 5.0])
    found = update_difference(torch.tensor(sent), torch.tensor(right), base, parameters)
    assert found == pytest.approx(difference, rel=1e-4, nan_ok=True)


RIGHT, WRONG, LEFT = RepetitionOutcome


@pytest.mark.parametrize(
    ("results", "accused"),
    [
        ([("bob", RIGHT)] * 9 + [("eve", WRONG)] * (MAX_WRONG - 1), []),
        ([("bob", RIGHT)] + [("eve", WRONG)] * MAX_WRONG, ["eve"]),
        ([("eve", RIGHT)] + [("eve", WRONG)] * MAX_WRONG, ["eve"]),
        # No machine gets what another one got.
        ([("bob", WRONG), ("eve", WRONG)] * MAX_WRONG, []),
        ([("eve", LEFT)] * (MAX_LEFT - 1), []),
        ([("eve", LEFT)] * MAX_LEFT, ["eve"]),
        ([("eve", RIGHT)] * MAX_LEFT + [("eve", LEFT)] * MAX_LEFT, []),
    ],
)
def test_an_owner_is_accused_for_wrong_updates_and_for_leaving(
    results: list[tuple[str, RepetitionOutcome]], accused: list[str]
) -> None:
    judge = RepetitionJudge()
    for owner, result in results:
        judge.count(owner, result)

    assert [owner for owner in ("bob", "eve") if judge.accusation(owner)] == accused
    assert judge.is_unclear is (not accused and len(results) > 1 and {
        result for _, result in results} == {WRONG})  # fmt: skip
