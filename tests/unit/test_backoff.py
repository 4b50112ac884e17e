"""Exponential back-off."""

from __future__ import annotations

import pytest

from vcasgd.backoff import backoff, jittered


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [(-1, 0), (0, 0), (1, 5), (2, 10), (3, 20), (6, 160), (7, 300), (10_000, 300)],
)
def test_delays_double_up_to_the_limit(failures: int, seconds: float) -> None:
    assert backoff(failures, first=5, limit=300) == seconds


def test_jitter_shortens_a_delay_by_at_most_half() -> None:
    delays = {jittered(8.0) for _ in range(100)}

    assert len(delays) > 1
    assert all(4.0 <= delay <= 8.0 for delay in delays)
