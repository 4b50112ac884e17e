"""Calls to clouds on threads, so that a slow cloud delays neither decisions nor other clouds."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from vcasgd.errors import FleetError, StoreError
from vcasgd.fleet.providers.base import Provider

log = logging.getLogger(__name__)
T = TypeVar("T")


class CallKind(StrEnum):
    """Kind of a call. Each has threads of its own, so that none waits for those of another one."""

    LIST = "list machines"
    PRICES = "get prices"
    BOOT_REPORT = "read a boot report"
    LAUNCH = "launch"
    TERMINATE = "terminate"
    REQUEST = "evict"


#: Kinds that change machines. Only the controller that acts may start them.
CHANGES = (CallKind.LAUNCH, CallKind.TERMINATE, CallKind.REQUEST)
#: Most threads for each provider. Their sum is at most the providers' ``CONNECTIONS``.
THREADS = {
    CallKind.LIST: 1,
    CallKind.PRICES: 1,
    CallKind.BOOT_REPORT: 4,
    CallKind.LAUNCH: 4,
    CallKind.TERMINATE: 8,
    CallKind.REQUEST: 2,
}
#: Calls of a kind that may be under way or wait for a thread; others are decided again later.
MAX_CALLS = 256

#: Provider and kind.
_Lane = tuple[int, CallKind]


class NotLeading(FleetError):
    """The call was not made, because another controller may act."""


@dataclass(frozen=True)
class _Call:
    provider: Provider
    future: Future[Any]
    done: Callable[[Future[Any]], None]


class CloudCalls:
    """Starts calls, and delivers their answers to the thread that collects them.

    Providers limit the time of each call. A call whose answer is never collected, because the
    process ended, may be repeated by the next process, like every call to a provider.
    """

    def __init__(self, leads: Callable[[], bool] = lambda: True) -> None:
        """Create it. ``leads``: False when another controller may act; threads call it."""
        self._leads = leads
        self._threads: dict[_Lane, ThreadPoolExecutor] = {}
        self._calls: dict[tuple[_Lane, str], _Call] = {}
        self._number: Counter[_Lane] = Counter()
        #: Calls that were started after the last collection.
        self._new: list[tuple[CallKind, Future[Any]]] = []
        self._retired: list[Provider] = []

    def start(
        self,
        kind: CallKind,
        provider: Provider,
        about: str,
        call: Callable[[], T],
        done: Callable[[Future[T]], None],
    ) -> bool:
        """Start a call; :meth:`collect` passes its result to ``done``.

        Returns False if such a call ``about`` the same is under way, or if too many calls are.
        """
        lane = id(provider), kind
        if (lane, about) in self._calls or self._number[lane] >= MAX_CALLS:
            return False
        if lane not in self._threads:
            name = f"{provider.name}: {kind}"
            self._threads[lane] = ThreadPoolExecutor(THREADS[kind], thread_name_prefix=name)
        future = self._threads[lane].submit(self._make, kind, call)
        self._calls[lane, about] = _Call(provider, future, done)
        self._number[lane] += 1
        self._new.append((kind, future))
        return True

    def _make(self, kind: CallKind, call: Callable[[], T]) -> T:
        # It may have waited for a thread for longer than the leadership lasted.
        if kind in CHANGES and not self._leads():
            raise NotLeading("another controller acts")
        return call()

    def collect(self, wait_seconds: float = 0.0, *kinds: CallKind) -> None:
        """Deliver the results of all calls that are done.

        First waits up to ``wait_seconds`` for the calls of some ``kinds``, but for each only once.
        Raises :class:`StoreError` if a result can't be recorded. It is then lost, as if the process
        had ended; those of other calls follow next time.
        """
        wait([future for kind, future in self._new if kind in kinds], wait_seconds)
        self._new = []
        for key in [key for key, call in self._calls.items() if call.future.done()]:
            lane, about = key
            call = self._calls.pop(key)
            self._number[lane] -= 1
            try:
                call.done(call.future)
            except FleetError as error:
                # The next round observes the outcome and decides again.
                log.warning("%s (%s): %s", lane[1], about, error)
            except StoreError:
                raise
            except Exception:
                # One answer that can't be handled must not stop those about other machines.
                log.exception("%s (%s)", lane[1], about)
        self._close_retired()

    def retire(self, provider: Provider) -> None:
        """Close a provider that is no longer used, once its calls are done."""
        self._retired.append(provider)

    def _close_retired(self) -> None:
        busy = {id(call.provider) for call in self._calls.values()}
        for provider in [each for each in self._retired if id(each) not in busy]:
            self._retired.remove(provider)
            for lane in [lane for lane in self._threads if lane[0] == id(provider)]:
                self._threads.pop(lane).shutdown(wait=False)
            provider.close()
