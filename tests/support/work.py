"""Work of a function, counted instead of timed, and its memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType


def calls_of(work: Callable[[], object]) -> int:
    """Run ``work``, and return the number of function calls in it, which no other load changes."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def memory_of(work: Callable[[], object]) -> int:
    """Run ``work``, and return the most bytes in memory meanwhile, less those before."""
    before = _bytes("VmRSS")
    # The most memory from now on is what this process has had since then.
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _bytes("VmHWM") - before


def _bytes(kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
