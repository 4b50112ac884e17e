"""Resident memory and processor time of processes, read from the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import psutil

from vcasgd.errors import StackError


@dataclass
class Gauge:
    """Measurements of one process, in bytes and seconds.

    ``baseline`` is its resident memory before the job started.
    """

    pid: int
    baseline: int
    samples: list[tuple[float, int]] = field(default_factory=list)
    cpu_seconds: float = 0.0

    @property
    def smallest(self) -> int:
        return min(resident for _, resident in self.samples)

    @property
    def largest(self) -> int:
        return max(resident for _, resident in self.samples)

    def slope(self) -> float:
        """Return bytes per second, by least squares over the second half of the samples."""
        later = self.samples[len(self.samples) // 2 :]
        if len(later) < 2:
            return 0.0
        at, resident = np.array(later).T
        return float(np.polyfit(at - at[0], resident, 1)[0])


class ProcessGauges:
    """Gauges of several processes.

    Methods raise :class:`StackError` if one of the processes has ended.
    """

    def __init__(self) -> None:
        self.all: dict[str, Gauge] = {}
        self._cpu_before: dict[str, float] = {}

    def watch(self, name: str, pid: int, baseline: int | None = None) -> None:
        """Add a process; ``baseline`` defaults to its current resident memory."""
        self.all[name] = Gauge(pid, resident_bytes(pid) if baseline is None else baseline)

    def begin(self) -> None:
        """Start to count processor time."""
        self._cpu_before = {name: _cpu_seconds(gauge.pid) for name, gauge in self.all.items()}

    def sample(self, at: float) -> None:
        for gauge in self.all.values():
            gauge.samples.append((at, resident_bytes(gauge.pid)))

    def end(self) -> None:
        for name, gauge in self.all.items():
            gauge.cpu_seconds = _cpu_seconds(gauge.pid) - self._cpu_before[name]


def resident_bytes(pid: int) -> int:
    with _running(pid):
        return int(psutil.Process(pid).memory_info().rss)


def _cpu_seconds(pid: int) -> float:
    with _running(pid):
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def _running(pid: int) -> Iterator[None]:
    try:
        yield
    except psutil.Error as error:
        raise StackError(f"process {pid} ended while it was measured") from error
