"""What all tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from waiting import await_truth


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """``eventually(predicate, timeout)``: waits for a state of the world, with a deadline."""
    return await_truth
