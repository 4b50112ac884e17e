"""Sandboxes of tests, with a real bubblewrap."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from support.missing import skip_here
from vcasgd.agent.sandbox import Sandbox, make_sandbox

MEMORY, FILES = "4GB", "100MB"


def working_sandbox(**options: Any) -> Sandbox:
    """Return a sandbox with small limits. Skips the test if none works here, but not in CI."""
    if why_not := _why_not():
        skip_here(f"no sandbox works here: {why_not}")
    return _sandbox(**options)


def sandbox_options() -> tuple[str, ...]:
    """Return the options that a machine needs to join here."""
    return ("--sandbox", "off") if _why_not() else ()


def _sandbox(**options: Any) -> Sandbox:
    return make_sandbox(sorted(os.sched_getaffinity(0))[:1], MEMORY, FILES, **options)


@cache
def _why_not() -> str | None:
    return _sandbox().why_not(0)
