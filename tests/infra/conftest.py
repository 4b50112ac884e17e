"""A fake of Google's APIs, which the scripts of machines call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.fake_google import FakeGoogle


@pytest.fixture
def google() -> Iterator[FakeGoogle]:
    with FakeGoogle() as server:
        yield server
