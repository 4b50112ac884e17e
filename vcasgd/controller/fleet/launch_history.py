"""Launch history: how pools and their markets answered, for launch tokens, back-off, and quotas."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from vcasgd.backoff import backoff
from vcasgd.errors import CloudUnavailable, FleetError, NoCapacity, QuotaExceeded, Throttled
from vcasgd.fleet.observed import Market
from vcasgd.fleet.plan import Blame, Launch, market_name
from vcasgd.fleet.providers.base import Machine
from vcasgd.store.ledger.control import Control, LaunchRecord

log = logging.getLogger(__name__)

#: Seconds before a market is retried after its first refusal, and at most after later ones.
BACKOFF_SECONDS = (1.0, 300.0)
#: The same after machines that were granted and never joined: each such attempt costs money.
FAILED_BOOT_SECONDS = (60.0, 3600.0)
#: Seconds after which an account's quota may have been raised; until then, a launch only replaces
#: machines that ended.
QUOTA_SECONDS = 3600.0


class LaunchHistory:
    """Reads the ledger once per round, and writes every answer at once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._rows: dict[str, LaunchRecord] = {}

    def load(self) -> None:
        """Read all rows."""
        self._rows = self._control.launches()

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
        """Record a launch that was granted."""
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
            why = f"quota: the account may have {held} such machines: {error}"
            row = LaunchRecord(blocked_until=now + QUOTA_SECONDS, reason=why, quota=held)
            self._set(_quota_name(launch.pool, launch.spot), row)
        elif not isinstance(error, NoCapacity):
            name = launch.pool
        self._block(name, str(error), now)

    def boot_failed(
        self, blame: Blame, now: float, waits: tuple[float, float] = FAILED_BOOT_SECONDS
    ) -> None:
        """Block the market of a machine that never joined.

        ``waits``: seconds after the first one in a row, and at most after later ones.
        """
        name = market_name(blame.pool, blame.zone, blame.spot)
        row = self.pool(name)
        count = row.failed_boots + 1
        wait = backoff(count, *waits)
        log.info("%s: %s %s; next attempt in %.0f s", name, blame.machine_id, blame.reason, wait)
        why = f"{blame.machine_id} {blame.reason}"
        self._set(
            name,
            replace(
                row,
                failed_boots=count,
                given_up_at=now,
                blocked_until=now + wait,
                reason=why,
                refused_since=row.refused_since or now,
            ),
        )

    def joined(self, machines: Iterable[Machine]) -> None:
        """Unblock the markets of machines that joined."""
        for one in machines:
            name = market_name(one.pool, one.zone, one.spot)
            row = self._rows.get(name)
            if row is not None and row.failed_boots and one.launched_at > row.given_up_at:
                self._set(name, replace(row, failed_boots=0, refused_since=None))

    def _block(self, name: str, why: str, now: float) -> None:
        row = self.pool(name)
        failures = row.failures + 1
        wait = backoff(failures, *BACKOFF_SECONDS)
        log.info("%s refused a launch: %s; next attempt in %.0f s", name, why, wait)
        self._set(
            name,
            replace(
                row,
                failures=failures,
                blocked_until=now + wait,
                reason=why,
                refused_since=row.refused_since or now,
            ),
        )

    def _set(self, name: str, row: LaunchRecord) -> None:
        self._rows[name] = row
        self._control.set_launches(name, row)


def _quota_name(pool: str, spot: bool) -> str:
    return market_name(pool, "*", spot)


def _parts(name: str) -> tuple[str, str, str]:
    """Return pool, zone, and kind; the last two are empty for a whole pool."""
    pool, _, rest = name.partition("/")
    zone, _, kind = rest.partition("/")
    return pool, zone, kind
