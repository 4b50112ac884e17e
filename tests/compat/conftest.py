"""Fixtures of scripts."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def main_module() -> Iterator[None]:
    """A script that was refused stays where it is, and is the main module meanwhile."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before
