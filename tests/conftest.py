"""What all tests share."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.waiting import await_truth

pytest_plugins = ["support.api_fixtures", "support.process_fixtures", "support.store_fixtures"]

# how long an example takes says how busy the machine is
settings.register_profile(
    "patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# a shell lets what it starts in the background ignore it, and so would all that tests start
if threading.current_thread() is threading.main_thread() and (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: none of them is left for the end, when of several processes one
    would work at it and the others have nothing to do. (make test tells xdist to keep the order.)
    """
    weights: Counter[Path] = Counter()
    for item in items:
        if item.get_closest_marker("slow"):
            limit = item.get_closest_marker("timeout")
            weights[item.path] += limit.args[0] if limit else 100
    items.sort(key=lambda item: -weights[item.path])


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """``eventually(predicate)``: waits for a state of the world, with a generous deadline."""
    return await_truth
