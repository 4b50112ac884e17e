"""Pool that has fewer machines for a while, as a spot market has."""

from __future__ import annotations

import threading
import time

from vcasgd.chaos.lasting import FIRE_SECONDS, POLL_SECONDS, LastingFault
from vcasgd.chaos.scenario import Counts
from vcasgd.errors import FleetError, StackError
from vcasgd.fleet.providers.local.provider import LocalProvider


class LimitedCapacity(LastingFault):
    """Capacity of a local pool that follows a list of numbers.

    Machines beyond the capacity are killed, the youngest first, and no new ones start.
    """

    def __init__(self, provider: LocalProvider, counts: Counts) -> None:
        self._provider = provider
        self._counts = counts
        self._stopped = threading.Event()
        self._failure: FleetError | StackError | None = None
        self._thread = threading.Thread(target=self._follow, name="capacity", daemon=True)
        #: Machines that were taken, when the fault has ended.
        self.taken = 0

    def begin(self) -> None:
        self._limit(self._counts.machines[0])
        self._thread.start()

    def end(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._provider.override()
        if self._failure is not None:
            raise self._failure
        if not self.taken:
            raise StackError("the fault did not fire: the pool had no machine to take")

    def _follow(self) -> None:
        try:
            for count in self._counts.machines[1:]:
                if self._stopped.wait(self._counts.seconds):
                    return
                self._limit(count)
        except (FleetError, StackError) as error:
            self._failure = error

    def _limit(self, count: int) -> None:
        """Set the capacity, and return when no more machines are left."""
        self._provider.override(capacity=count)
        deadline = time.monotonic() + FIRE_SECONDS
        taken: set[str] = set()
        while True:
            present = sorted(self._provider.machines(), key=lambda one: one.launched_at)
            if len(present) <= count:
                break
            if time.monotonic() > deadline:
                raise StackError(f"the fault did not fire: {len(present)} machines are left")
            for one in present[count:]:
                self._provider.kill(one.id)
                taken.add(one.id)
            time.sleep(POLL_SECONDS)
        self.taken += len(taken)
