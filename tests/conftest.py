"""Options, order and fixtures that all tests share."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

pytest_plugins = ["support.fixtures"]

TESTS = Path(__file__).parent
#: Files and folders that start a stack with Ray and machines. One process runs them one after the
#: other, because many stacks at a time would keep two cores so busy that leases expire.
WHOLE_STACKS = (
    "chaos",
    "cli/test_demo.py",
    "terraform/test_terraform_local.py",
)
#: Folders with the longest files, the longest first. Each of several processes takes the next file
#: that is left, so a long file that started last would run alone; the many short ones of other
#: folders fill the end.
LONG = (
    *("browser", "agent", "cluster", "stack", "terraform", "worker", "system", "infra", "gateway"),
    *("fleet", "cli", "compat", "integrations", "verification", "controller", "store", "api"),
)

# The time that an example takes depends on the load of the machine.
settings.register_profile(
    "thorough", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
#: Most examples of a property in ``make test``; ``--extended`` tries a hundred.
settings.register_profile("short", settings.get_profile("thorough"), max_examples=30)

# A shell starts background commands with SIGINT ignored, and their children inherit that.
if threading.current_thread() is threading.main_thread() and (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


class FileScheduling(LoadFileScheduling):
    """Keeps each file in one process, and all whole stacks in the same process."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return "stacks" if _is_whole_stack(TESTS.parent / file) else file


def _is_whole_stack(path: Path) -> bool:
    return any(path.is_relative_to(TESTS / place) for place in WHOLE_STACKS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return FileScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--extended",
        action="store_true",
        help="also run long tests, and every store test on Redis as well as on Valkey",
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("thorough" if config.getoption("--extended") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the long tests unless ``--extended`` is given, and sort long files first.

    ``make test`` tells xdist to keep this order.
    """
    if not config.getoption("--extended"):
        extended = [item for item in items if _is_extended(item)]
        config.hook.pytest_deselected(items=extended)
        items[:] = [item for item in items if item not in set(extended)]
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))

    def rank(item: pytest.Item) -> tuple[int, int]:
        folder = item.path.relative_to(TESTS).parts[0]
        place = LONG.index(folder) if folder in LONG else len(LONG)
        return (-1 if _is_whole_stack(item.path) else place), -slow[item.path]

    items.sort(key=rank)


def _is_extended(item: pytest.Item) -> bool:
    """Return True for marked tests, and for those on Redis that need no second server."""
    if item.get_closest_marker("extended") or item.get_closest_marker("ci"):
        return True
    call = getattr(item, "callspec", None)
    values = call.params.values() if call else ()
    on_redis = any(isinstance(value, str) and value == "redis" for value in values)
    return on_redis and not item.get_closest_marker("both_servers")


@pytest.fixture(autouse=True)
def no_loop_is_left() -> Iterator[None]:
    """Fail a test that leaves a loop waiting in a thread, which watches torch in this process."""
    before = set(threading.enumerate())
    yield
    left = [each for each in threading.enumerate() if each.name == "script"]
    assert before.issuperset(left), "close the task of the script or the trainer"
