"""s(τ): numbers computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcasgd.learning.rules.base import staleness_weight
from vcasgd.spec.update import Staleness


@pytest.mark.parametrize(
    ("spec", "tau", "expected"),
    [
        ({"function": "constant"}, 0, 1.0),
        ({"function": "constant"}, 1000, 1.0),
        ({"function": "polynomial"}, 0, 1.0),
        ({"function": "polynomial"}, 3, 0.5),  # 4^-½
        ({"function": "polynomial", "a": 2}, 3, 1 / 16),
        ({"function": "hinge"}, 4, 1.0),
        ({"function": "hinge"}, 5, 1 / 11),  # 1/(10·(5−4)+1)
        ({"function": "hinge", "a": 0.5, "b": 2}, 4, 0.5),
    ],
)
def test_formulas(spec: dict[str, object], tau: int, expected: float) -> None:
    assert staleness_weight(Staleness.model_validate(spec), tau) == pytest.approx(expected)


specs = st.builds(
    Staleness,
    function=st.sampled_from(["constant", "polynomial", "hinge"]),
    a=st.floats(0.01, 20),
    b=st.floats(0, 20),
)


@given(specs, st.integers(0, 10_000))
def test_older_updates_never_weigh_more(spec: Staleness, tau: int) -> None:
    assert 0 < staleness_weight(spec, tau + 1) <= staleness_weight(spec, tau) <= 1


@given(specs, st.integers(max_value=-1))
def test_negative_staleness_counts_as_zero(spec: Staleness, tau: int) -> None:
    assert staleness_weight(spec, tau) == staleness_weight(spec, 0) == 1
