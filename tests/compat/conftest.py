"""Fixtures of scripts."""

import sys
from collections.abc import Iterator

import pytest
from support.compat import made

from vcasgd.session.script import LoopInThread


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """A script that was refused stays where it is, and is the main module meanwhile."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture(autouse=True)
def end_of_loops() -> Iterator[None]:
    """A loop that waits for its next batch watches torch."""
    yield
    while made:
        task = made.pop()
        if isinstance(task, LoopInThread):
            task.close()
