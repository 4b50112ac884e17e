"""Needs of tests that a machine may lack."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_here(reason: str) -> NoReturn:
    """Skip the test; in CI, which has everything, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
