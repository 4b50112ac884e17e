"""The average of a model over steps of which only the versions between them are known."""

from __future__ import annotations

import pytest

from vcasgd.errors import SpecError
from vcasgd.learning.rules import average_coefficients, longest_interval
from vcasgd.spec.job import JobSpec


@pytest.mark.parametrize("decay", [0.1, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("steps", [1, 2, 7, 100])
def test_steps_on_a_line_are_averaged_as_one_by_one(decay: float, steps: int) -> None:
    first, last, average = 3.0, 5.0, -1.0

    expected = average
    for step in range(1, steps + 1):
        weight = first + (last - first) * step / steps
        expected = decay * expected + (1 - decay) * weight

    kept, share = average_coefficients(decay, steps)
    assert kept * average + (1 - kept) * first + share * (last - first) == pytest.approx(expected)


def test_parts_of_a_step_add_up_to_it() -> None:
    halves = average_coefficients(0.9, 0.5)[0] ** 2

    assert halves == pytest.approx(average_coefficients(0.9, 1)[0])


@pytest.mark.parametrize(("decay", "steps"), [(0.999, 62.5), (0.99, 6.25), (0.5, 1.0)])
def test_an_average_has_enough_versions(decay: float, steps: float) -> None:
    assert longest_interval(decay) == pytest.approx(steps)


def spec(**fields: object) -> JobSpec:
    return JobSpec.parse({"name": "j", "task": "t:T", "epochs": 1, **fields})


def test_a_number_is_the_decay() -> None:
    assert spec(ema=0.999).ema == spec(ema={"decay": 0.999}).ema
    assert spec().ema is None


@pytest.mark.parametrize("ema", [0, 1, 1.5, -0.1, "0.9", True, {"evaluate": "instead"}])
def test_other_averages_are_refused(ema: object) -> None:
    with pytest.raises(SpecError, match="ema"):
        spec(ema=ema)


def test_a_rule_that_averages_itself_is_refused() -> None:
    with pytest.raises(SpecError, match="ema can't be combined with the rule sma"):
        spec(ema=0.9, update={"rule": "sma"})
