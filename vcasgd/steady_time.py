"""Time that does not stop while the machine is suspended, or jump when its clock is set."""

from __future__ import annotations

import time

#: The clock of :func:`boot_time`; the monotonic one of other systems than Linux.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_time() -> float:
    """Return seconds since the machine started, the same in all of its processes.

    Unlike :func:`time.monotonic`, it counts those in which the machine was suspended. Judge by it
    what ends at some time for others, too: leases, deadlines, what was read some time ago. Pauses
    and durations of one's own work are those of :func:`time.monotonic`.
    """
    return time.clock_gettime(_CLOCK)


_START = time.time() - boot_time()


def steady_time() -> float:
    """Return the Unix time, in seconds, as the clock had it when the process started.

    It advances with :func:`boot_time`. So durations between two calls are right, and a deadline
    that has passed stays in the past, whatever happens to the clock.
    """
    return unix_time(boot_time())


def unix_time(at: float) -> float:
    """Return the :func:`steady_time` at a :func:`boot_time`."""
    return _START + at
