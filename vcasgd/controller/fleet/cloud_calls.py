"""Calls to clouds on threads, and how pools and their markets answered launches.

A slow cloud therefore delays neither decisions nor other clouds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from vcasgd.backoff import backoff
from vcasgd.errors import (
    CloudUnavailable,
    FleetError,
    NoCapacity,
    QuotaExceeded,
    StoreError,
    Throttled,
    VcasgdError,
)
from vcasgd.fleet.observed import Market
from vcasgd.fleet.plan import Blame, Launch, market_name
from vcasgd.fleet.providers.base import Provider
from vcasgd.schemas.fleet import Machine
from vcasgd.store.ledger.control import Control, LaunchRecord

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
#: Seconds before a market is retried after its first refusal, and at most after later ones.
BACKOFF_SECONDS = (1.0, 300.0)
#: The same after machines that were granted and never joined: each such attempt costs money.
FAILED_BOOT_SECONDS = (60.0, 3600.0)
#: Seconds after which an account's quota may have been raised; until then, a launch only replaces
#: machines that ended.
QUOTA_SECONDS = 3600.0
#: Most seconds for which a pool or market is blocked.
MAX_SECONDS = max(BACKOFF_SECONDS[1], FAILED_BOOT_SECONDS[1], QUOTA_SECONDS)

#: Provider and kind.
_Lane = tuple[int, CallKind]


class NotLeading(FleetError):
    """The call was not made, because another controller may act."""


@dataclass(frozen=True)
class _Call:
    provider: Provider[Any]
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
        #: Calls that were started after the last collection.
        self._new: list[tuple[CallKind, Future[Any]]] = []
        self._retired: list[Provider[Any]] = []

    def start(
        self,
        kind: CallKind,
        provider: Provider[Any],
        about: str,
        call: Callable[[], T],
        done: Callable[[Future[T]], None],
    ) -> Future[T] | None:
        """Start a call, and return it; :meth:`collect` passes its result to ``done``.

        Returns None if such a call ``about`` the same is under way, or if too many calls are.
        """
        lane = id(provider), kind
        number = sum(each == lane for each, _ in self._calls)
        if (lane, about) in self._calls or number >= MAX_CALLS:
            return None
        if lane not in self._threads:
            name = f"{provider.name}: {kind}"
            self._threads[lane] = ThreadPoolExecutor(THREADS[kind], thread_name_prefix=name)
        future = self._threads[lane].submit(self._make, kind, call)
        self._calls[lane, about] = _Call(provider, future, done)
        self._new.append((kind, future))
        return future

    def _make(self, kind: CallKind, call: Callable[[], T]) -> T:
        # It may have waited for a thread for longer than the leadership lasted.
        if kind in CHANGES and not self._leads():
            raise NotLeading("another controller acts")
        try:
            return call()
        except VcasgdError:
            raise
        except Exception as error:
            # Such as an answer that a cloud's library can't read. What was asked may have happened.
            log.exception("%s", kind)
            raise CloudUnavailable(f"{kind}: {type(error).__name__}: {error}") from error

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

    def retire(self, provider: Provider[Any]) -> None:
        """Close a provider that is no longer used, once its calls are done."""
        self._retired.append(provider)

    def _close_retired(self) -> None:
        busy = {id(call.provider) for call in self._calls.values()}
        for provider in [each for each in self._retired if id(each) not in busy]:
            self._retired.remove(provider)
            for lane in [lane for lane in self._threads if lane[0] == id(provider)]:
                self._threads.pop(lane).shutdown(wait=False)
            provider.close()


class LaunchHistory:
    """Reads the ledger once per round, and writes every answer at once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._rows: dict[str, LaunchRecord] = {}

    def load(self, now: float) -> None:
        """Read all rows. A block that ends later than any does was written by a clock far ahead."""
        self._rows = {
            name: row if row.blocked_until <= now + MAX_SECONDS else replace(row, blocked_until=now)
            for name, row in self._control.launches().items()
        }

    def pool(self, name: str) -> LaunchRecord:
        """Return the row of a pool or market; an empty one if it has none."""
        return self._rows.get(name, LaunchRecord())

    def markets(self, pool: str, now: float) -> dict[tuple[str, bool], Market]:
        """Return the markets of a pool by zone and whether they are spot."""
        markets = {}
        for name, row in self._rows.items():
            owner, zone, kind = _parts(name)
            if owner == pool and zone not in ("", "*"):
                reason = row.reason if row.blocked_until > now else None
                markets[zone, kind == "spot"] = Market(
                    row.launches, row.blocked_until, reason, row.refused_since
                )
        return markets

    def quotas(self, pool: str, now: float) -> dict[bool, int]:
        """Return the quotas that recent refusals revealed, by whether they are for spot."""
        rows = {spot: self.pool(_quota_name(pool, spot)) for spot in (True, False)}
        return {
            spot: row.quota
            for spot, row in rows.items()
            if row.quota is not None and row.blocked_until > now
        }

    def reasons(self, pool: str, now: float) -> list[str]:
        """Return why parts of the pool are blocked, as text for users."""
        reasons = []
        for name, row in sorted(self._rows.items()):
            owner, zone, kind = _parts(name)
            if owner == pool and row.blocked_until > now and row.reason:
                where = f"{zone} ({kind}): " if zone not in ("", "*") else ""
                reasons.append(where + row.reason)
        return reasons

    # -- answers -------------------------------------------------------------------------------

    def granted(self, launch: Launch) -> None:
        name = market_name(launch.pool, launch.zone, launch.spot)
        row = self.pool(name)
        row = replace(row, launches=row.launches + 1, failures=0)
        # Granted machines count as an answer only once one of them joins, and a boot may have
        # failed since the launch was requested.
        if not row.failed_boots:
            row = replace(row, blocked_until=0.0, reason=None, refused_since=None)
        self._set(name, row)
        if self.pool(launch.pool).failures:
            self._set(launch.pool, LaunchRecord())

    def refused(self, launch: Launch, error: FleetError, held: int, now: float) -> None:
        """Record a launch that was refused. ``held``: machines of its kind that the pool has."""
        name = market_name(launch.pool, launch.zone, launch.spot)
        # A launch that may have happened anyway is retried with the same token.
        if not isinstance(error, CloudUnavailable | Throttled):
            row = self.pool(name)
            self._set(name, replace(row, launches=row.launches + 1))
        if isinstance(error, QuotaExceeded):
            # There may be room for a part: some clouds refuse a launch as a whole.
            quota = held + launch.count // 2
            why = f"quota: the account may have {quota} such machines: {error}"
            row = LaunchRecord(blocked_until=now + QUOTA_SECONDS, reason=why, quota=quota)
            self._set(_quota_name(launch.pool, launch.spot), row)
        elif not isinstance(error, NoCapacity):
            name = launch.pool
        failures = self.pool(name).failures + 1
        self._block(name, str(error), now, backoff(failures, *BACKOFF_SECONDS), failures=failures)

    def boot_failed(
        self, blame: Blame, now: float, waits: tuple[float, float] = FAILED_BOOT_SECONDS
    ) -> None:
        """Block the market of a machine that never joined.

        ``waits``: seconds after the first one in a row, and at most after later ones.
        """
        name = market_name(blame.pool, blame.zone, blame.spot)
        why = f"{blame.machine_id} {blame.reason}"
        count = self.pool(name).failed_boots + 1
        self._block(name, why, now, backoff(count, *waits), failed_boots=count, given_up_at=now)

    def joined(self, machines: Iterable[Machine]) -> None:
        """Unblock the markets of machines that joined."""
        for one in machines:
            name = market_name(one.pool, one.zone, one.spot)
            row = self._rows.get(name)
            if row is not None and row.failed_boots and one.launched_at > row.given_up_at:
                self._set(name, replace(row, failed_boots=0, refused_since=None))

    def _block(self, name: str, why: str, now: float, wait: float, **counts: Any) -> None:
        """Block a pool or market for ``wait`` seconds; ``counts`` are further fields of its row."""
        log.info("%s is blocked: %s; next attempt in %.0f s", name, why, wait)
        row = self.pool(name)
        since = row.refused_since or now
        row = replace(row, blocked_until=now + wait, reason=why, refused_since=since, **counts)
        self._set(name, row)

    def _set(self, name: str, row: LaunchRecord) -> None:
        self._rows[name] = row
        self._control.set_launches(name, row)


def _quota_name(pool: str, spot: bool) -> str:
    return market_name(pool, "*", spot)


def _parts(name: str) -> tuple[str, str, str]:
    """Return pool, zone, and kind; the last two are empty for a whole pool."""
    pool, _, rest = name.partition("/")
    zone, _, kind = rest.rpartition("/")
    return pool, zone, kind
