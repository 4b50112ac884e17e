"""Numbers that a task logs from its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vcasgd.errors import UserCodeError
from vcasgd.limits import MAX_LOGGED
from vcasgd.task.logged import LoggedSums


def test_values_of_all_kinds_add_up() -> None:
    collector = LoggedSums()
    collector.add({"norm": 1, "train/acc": torch.tensor([0.5], requires_grad=True)})
    collector.add({"norm": torch.tensor(2.5)})

    assert collector.take() == {"norm": (3.5, 2), "train/acc": (0.5, 1)}
    assert collector.take() == {}


def test_what_is_not_finite_is_left_out() -> None:
    collector = LoggedSums()
    collector.add({"a": float("nan"), "b": float("inf"), "c": 1e308, "d": 1.0})

    assert collector.take() == {"d": (1.0, 1)}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"a": "1"}, "a is a str, not a number"),
        ({"a": None}, "a is a NoneType"),
        ({"a": True}, "a is a bool"),
        ({"a": torch.ones(2)}, "a is a Tensor"),
        ({"": 1.0}, "'' is not a name"),
        ({"a b": 1.0}, "not a name"),
        ({"a" * 65: 1.0}, "not a name"),
        ({1: 1.0}, "1 is not a name"),
    ],
)
def test_anything_else_is_refused(values: dict[Any, Any], problem: str) -> None:
    with pytest.raises(UserCodeError, match=problem):
        LoggedSums().add(values)


def test_names_that_never_end_are_refused() -> None:
    collector = LoggedSums()
    for step in range(MAX_LOGGED):
        collector.add({f"step_{step}": 1.0})
        collector.take()

    with pytest.raises(UserCodeError, match=f"more than {MAX_LOGGED} metrics"):
        collector.add({"another": 1.0})
