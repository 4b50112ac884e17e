"""Options, order and fixtures that all tests share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.waiting import await_truth

pytest_plugins = ["support.api_fixtures", "support.process_fixtures", "support.store_fixtures"]

TESTS = Path(__file__).parent
#: The longest files, longest first. Each of several processes takes the next file that is left,
#: so a long file that started last would run alone.
LONGEST_FIRST = (
    "chaos/test_whole_stack.py",
    "chaos/test_audit.py",
)

# The time that an example takes depends on the load of the machine.
settings.register_profile(
    "patient", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# A shell starts background commands with SIGINT ignored, and their children inherit that.
if threading.current_thread() is threading.main_thread() and (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--extended",
        action="store_true",
        help="also run the extended tests, and every store test on Redis as well as on Valkey",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the extended tests unless ``--extended`` is given, and sort the longest files first.

    ``make test`` tells xdist to keep this order.
    """
    if not config.getoption("--extended"):
        extended = [item for item in items if _is_extended(item)]
        config.hook.pytest_deselected(items=extended)
        items[:] = [item for item in items if item not in set(extended)]
    ranks = {TESTS / path: rank for rank, path in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def _is_extended(item: pytest.Item) -> bool:
    """Return True for marked tests, and for those on Redis that need no second server."""
    if item.get_closest_marker("extended"):
        return True
    call = getattr(item, "callspec", None)
    values = call.params.values() if call else ()
    on_redis = any(isinstance(value, str) and value == "redis" for value in values)
    return on_redis and not item.get_closest_marker("both_servers")


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """``eventually(predicate)`` waits until the predicate is true, with a generous deadline."""
    return await_truth
