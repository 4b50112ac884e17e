"""How pools and their markets answered, in the ledger: what makes tokens, back-off and quotas."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from vcasgd.backoff import backoff
from vcasgd.errors import CloudUnavailable, FleetError, NoCapacity, QuotaExceeded, Throttled
from vcasgd.fleet.observed import Market
from vcasgd.fleet.plan import Blame, Launch, market_name
from vcasgd.fleet.providers.base import Instance
from vcasgd.store.ledger.servers import Control, Pool

log = logging.getLogger(__name__)

#: who refused is asked again after the first number of seconds, later up to the second
BACKOFF_SECONDS = (1.0, 300.0)
#: the same where machines were granted and never joined: each of those attempts costs money
STILLBORN_SECONDS = (60.0, 3600.0)
#: an account's quota may have been raised after so long; until then only places that become free
#: are taken again
QUOTA_SECONDS = 3600.0


class LaunchHistory:
    """One look at a time; every answer is written at once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._rows: dict[str, Pool] = {}

    def load(self) -> None:
        self._rows = self._control.all_pools()

    def pool(self, name: str) -> Pool:
        return self._rows.get(name, Pool())

    def markets(self, pool: str, now: float) -> dict[tuple[str, bool], Market]:
        """By zone and whether it is spot."""
        found = {}
        for name, row in self._rows.items():
            place, zone, kind = _parts(name)
            if place == pool and zone not in ("", "*"):
                reason = row.reason if row.blocked_until > now else None
                found[zone, kind == "spot"] = Market(
                    row.launches, row.blocked_until, reason, row.refused_since
                )
        return found

    def quotas(self, pool: str, now: float) -> dict[bool, int]:
        """By whether it is spot, as far as a refusal told lately."""
        rows = {spot: self.pool(_quota_name(pool, spot)) for spot in (True, False)}
        return {
            spot: row.quota
            for spot, row in rows.items()
            if row.quota is not None and row.blocked_until > now
        }

    def reasons(self, pool: str, now: float) -> list[str]:
        """Why which part of the pool is left alone, for people."""
        found = []
        for name, row in sorted(self._rows.items()):
            place, zone, kind = _parts(name)
            if place == pool and row.blocked_until > now and row.reason:
                where = f"{zone} ({kind}): " if zone not in ("", "*") else ""
                found.append(where + row.reason)
        return found

    def launches(self, pool: str) -> int:
        """Of all its markets."""
        return sum(row.launches for name, row in self._rows.items() if _parts(name)[0] == pool)

    # -- answers -------------------------------------------------------------------------------

    def granted(self, launch: Launch) -> None:
        name = market_name(launch.pool, launch.zone, launch.spot)
        row = self.pool(name)
        still = row.stillborn > 0
        self._set(
            name,
            Pool(
                row.launches + 1,
                # who grants machines that never join has not answered well yet
                refused_since=row.refused_since if still else None,
                stillborn=row.stillborn,
                given_up_at=row.given_up_at,
            ),
        )
        whole = self.pool(launch.pool)
        if name != launch.pool and whole.failures:
            self._set(launch.pool, Pool(whole.launches))

    def refused(self, launch: Launch, error: FleetError, held: int, now: float) -> None:
        """``held``: machines of that kind that the pool has."""
        name = market_name(launch.pool, launch.zone, launch.spot)
        # what may have happened all the same is asked for again under the same token
        if not isinstance(error, CloudUnavailable | Throttled):
            row = self.pool(name)
            self._set(name, replace(row, launches=row.launches + 1))
        if isinstance(error, QuotaExceeded):
            why = f"quota: the account may have {held} machines of it: {error}"
            row = Pool(blocked_until=now + QUOTA_SECONDS, reason=why, quota=held)
            self._set(_quota_name(launch.pool, launch.spot is not False), row)
        elif not isinstance(error, NoCapacity):
            name = launch.pool
        self._block(name, str(error), now)

    def blamed(
        self, blame: Blame, now: float, waits: tuple[float, float] = STILLBORN_SECONDS
    ) -> None:
        """``waits``: seconds for the first in a row, and at most."""
        name = market_name(blame.pool, blame.zone or None, blame.spot)
        row = self.pool(name)
        count = row.stillborn + 1
        wait = backoff(count, *waits)
        log.info("%s: %s %s; next attempt in %.0f s", name, blame.instance_id, blame.reason, wait)
        why = f"{blame.instance_id} {blame.reason}"
        self._set(
            name,
            replace(
                row,
                stillborn=count,
                given_up_at=now,
                blocked_until=now + wait,
                reason=why,
                refused_since=row.refused_since or now,
            ),
        )

    def joined(self, machines: Iterable[Instance]) -> None:
        """Markets whose machines join are good again."""
        for one in machines:
            name = market_name(one.pool, one.zone or None, one.spot)
            row = self._rows.get(name)
            if row is not None and row.stillborn and one.launched_at > row.given_up_at:
                self._set(name, replace(row, stillborn=0, refused_since=None))

    def _block(self, name: str, why: str, now: float) -> None:
        row = self.pool(name)
        failures = row.failures + 1
        wait = backoff(failures, *BACKOFF_SECONDS)
        log.info("%s refuses: %s; next attempt in %.0f s", name, why, wait)
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

    def _set(self, name: str, row: Pool) -> None:
        self._rows[name] = row
        self._control.set_pool(name, row)


def _quota_name(pool: str, spot: bool) -> str:
    return market_name(pool, "*", spot)


def _parts(name: str) -> tuple[str, str, str]:
    """Pool, zone, kind; the last two are empty for the pool as a whole."""
    pool, _, rest = name.partition("/")
    zone, _, kind = rest.partition("/")
    return pool, zone, kind
