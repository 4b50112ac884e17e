"""The controller in the ledger: its lease, its view of the fleet, and requests to it."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import redis
from redis.client import Pipeline

import vcasgd
from vcasgd.errors import SpecError, VcasgdError
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient

#: Seconds for which the result of a request can be asked for.
RESULT_SECONDS = 3600
#: Seconds after which no controller begins with a request: its machine may do something else by
#: then, and its sender no longer waits.
REQUEST_SECONDS = 60.0
#: Start of the names of a controller's connections; its owner's name follows.
CONTROLLER_CONNECTION = "vcasgd-controller:"
#: Format of everything that a stack stores. A change that older versions can't read raises it.
DATA_FORMAT = 1


@dataclass(frozen=True)
class LaunchRecord:
    """Launch history of a pool or of one of its markets.

    ``launches`` with a known outcome, consecutive ``failures``, and the time until which the pool
    is not used. Times are Unix seconds.
    """

    launches: int = 0
    failures: int = 0
    blocked_until: float = 0.0
    reason: str | None = None
    #: Time of the first of the consecutive refusals.
    refused_since: float | None = None
    #: Limit of the account's machines, inferred from the last refusal.
    quota: int | None = None
    #: Consecutive machines that never joined, and when the last of them was given up.
    failed_boots: int = 0
    given_up_at: float = 0.0


@dataclass(frozen=True)
class ControlLease:
    """Answer to a controller that asks for the lease."""

    #: Token of the lease; 0 if another controller holds it.
    token: int
    #: Number of times that all controllers took and renewed it since it was last released.
    renewals: int


def enter_lease(connection: Any, owner: str) -> None:
    """Bind a new connection to a controller's lease.

    The name comes before the check, so a controller that takes the lease after the check finds the
    connection by its name and closes it (:meth:`Control.close_others`). Raises
    :class:`redis.ResponseError` if another controller holds the lease.
    """
    connection.send_command("CLIENT", "SETNAME", CONTROLLER_CONNECTION + owner)
    connection.read_response()
    connection.send_command("HGET", names.CONTROLLER, "owner")
    holder = connection.read_response()
    if holder not in (None, owner.encode()):
        raise redis.ResponseError("FENCED another controller holds the lease")


def _agree_on_format(ledger: RedisClient) -> None:
    """Record the format of the data.

    Raises :class:`~vcasgd.errors.SpecError` for data that this version can't read.
    """
    stored = ledger.hgetall(names.DATA_FORMAT)
    number = int(stored.get(b"format", DATA_FORMAT))
    if number != DATA_FORMAT:
        writer = stored.get(b"version", b"").decode()
        raise SpecError(
            f"the ledger has data of format {number}, which vcasgd {writer} wrote; "
            f"{vcasgd.__version__} reads format {DATA_FORMAT}",
            remedy=f"install vcasgd {writer}, or go back to the copy from before the "
            "upgrade, as the page Upgrade of the documentation describes",
        )
    ledger.hset(names.DATA_FORMAT, mapping={"format": DATA_FORMAT, "version": vcasgd.__version__})


class Control:
    """The controller's lease, its view of the fleet, and requests to it."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._control = ledger.script("ledger/control")

    def claim(self, cluster: str) -> None:
        """Claim the ledger for a cluster. Can be repeated.

        Two clusters with one ledger would terminate each other's machines and run each other's
        jobs. Raises :class:`~vcasgd.errors.SpecError` if another cluster owns it, or if this
        version can't read its data.
        """
        self._ledger.set(names.CLUSTER, cluster, nx=True)
        owner = (self._ledger.get(names.CLUSTER) or b"").decode()
        if owner != cluster:
            raise SpecError(
                f"VCASGD_CLUSTER: the ledger belongs to cluster {owner}, not to {cluster}",
                remedy=f"give each cluster its own servers, or set VCASGD_CLUSTER={owner}",
                field="VCASGD_CLUSTER",
            )
        _agree_on_format(self._ledger)

    def ledger_id(self) -> str:
        """Return an identifier that no other ledger has, also of the same cluster."""
        self._ledger.hsetnx(names.DATA_FORMAT, "id", secrets.token_hex(8))
        return (self._ledger.hget(names.DATA_FORMAT, "id") or b"").decode()

    def hold(self, owner: str, lease_seconds: float) -> ControlLease:
        """Take or renew the lease, unless another controller holds it."""
        lease_ms = max(1, int(lease_seconds * 1000))
        return ControlLease(*self._control(keys=[names.CONTROLLER], args=[owner, lease_ms]))

    def release(self, owner: str) -> None:
        """Release the lease if this controller holds it, so that the next one need not wait."""
        self._control(keys=[names.CONTROLLER], args=[owner, 0])

    def close_others(self, owner: str) -> None:
        """Close the connections of all controllers but the one that has just taken the lease.

        :func:`enter_lease` refuses them new ones, so none of them writes after this returns.
        """
        for client in self._ledger.client_list():
            name = client["name"]
            if name.startswith(CONTROLLER_CONNECTION) and name != CONTROLLER_CONNECTION + owner:
                self._ledger.client_kill_filter(_id=client["id"])

    def held(self) -> bool:
        """Return True if a controller holds the lease, by the ledger's clock."""
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.hmget(names.CONTROLLER, "deadline", "lease_ms")
            pipe.time()
            (deadline, lease_ms), (seconds, microseconds) = pipe.execute()
        left_ms: int = int(deadline or 0) - seconds * 1000 - microseconds // 1000
        # A lease that ends later than a new one was taken before the clock was set back.
        return 0 < left_ms <= int(lease_ms or 0)

    def record_round(self) -> None:
        """Record that the controller has observed the fleet and published its view."""
        self._ledger.hset(names.CONTROLLER, "looked_at", time.time())

    def last_round_at(self) -> float:
        """Return the time of the last round in Unix seconds; 0 before the first one."""
        return float(self._ledger.hget(names.CONTROLLER, "looked_at") or 0.0)

    def request(self, kind: str, **details: Any) -> str:
        """Send a request to the controller, which handles it soon.

        Returns its identifier, for :meth:`result`.
        """
        sent_at = self._ledger.now()
        row = {"id": secrets.token_hex(8), "kind": kind, "sent_at": sent_at, **details}
        with self._ledger.pipeline(transaction=True) as pipe:
            _set_result(pipe, row, "waiting")
            pipe.rpush(names.COMMANDS, json.dumps(row))
            pipe.execute()
        return str(row["id"])

    def result(self, identifier: str) -> dict[str, Any] | None:
        """Return a request with its ``state`` (waiting, done, or failed), ``problem``, and
        ``remedy``; None if there is none, or it has expired.
        """
        stored = self._ledger.get(names.request(identifier))
        row: dict[str, Any] | None = None if stored is None else json.loads(stored)
        return row

    def requests(self, most: int = 100) -> list[tuple[dict[str, Any], bool]]:
        """Return the oldest requests without a result, and whether each was sent too long ago.

        A controller carries out again what its predecessor may have. So only requests that can be
        repeated are sent this way; states are in the jobs' records.
        """
        with self._ledger.pipeline() as pipe:
            pipe.lrange(names.COMMANDS, 0, most - 1)
            pipe.time()
            texts, (now, _) = pipe.execute()
        rows = map(json.loads, texts)
        return [(row, now - row["sent_at"] > REQUEST_SECONDS) for row in rows]

    def finish(self, request: Mapping[str, Any], error: VcasgdError | None = None) -> None:
        """Record that one of :meth:`requests` was carried out, or why not."""
        with self._ledger.pipeline(transaction=True) as pipe:
            _set_result(pipe, request, "failed" if error else "done", error)
            pipe.lrem(names.COMMANDS, 1, json.dumps(request))
            pipe.execute()

    def publish(self, machines: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        """Replace the published view of the fleet."""
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.delete(names.MACHINES)
            _set_rows(pipe, names.MACHINES, machines)
            pipe.delete(names.POOLS)
            _set_rows(pipe, names.POOLS, pools)
            pipe.execute()

    def update(
        self, changed: Mapping[str, Any], removed: Iterable[str], pools: Mapping[str, Any] | None
    ) -> None:
        """Replace some machines of the published view, remove others, and replace all pools.

        None leaves the pools as they are.
        """
        gone = list(removed)
        with self._ledger.pipeline(transaction=True) as pipe:
            _set_rows(pipe, names.MACHINES, changed)
            if gone:
                pipe.hdel(names.MACHINES, *gone)
            if pools is not None:
                pipe.delete(names.POOLS)
                _set_rows(pipe, names.POOLS, pools)
            pipe.execute()

    def pool_specs(self) -> dict[str, dict[str, Any]]:
        """Return the configurations, as last used, of pools that may have machines."""
        return self._rows(names.POOL_SPECS)

    def set_pool_specs(self, specs: Mapping[str, Any]) -> None:
        """Store the configurations of pools that may have machines from now on."""
        _set_rows(self._ledger, names.POOL_SPECS, specs)

    def forget_pool_specs(self, pools: Iterable[str]) -> None:
        """Delete the configurations of pools whose provider has confirmed that they are empty."""
        self._ledger.hdel(names.POOL_SPECS, *pools)

    def launches(self) -> dict[str, LaunchRecord]:
        """Return the launch histories of all pools and markets."""
        return {name: LaunchRecord(**row) for name, row in self._rows(names.LAUNCHES).items()}

    def set_launches(self, name: str, record: LaunchRecord) -> None:
        """Replace the launch history of a pool or market."""
        _set_rows(self._ledger, names.LAUNCHES, {name: asdict(record)})

    def machines(self) -> dict[str, dict[str, Any]]:
        """Return the published view of machines."""
        return self._rows(names.MACHINES)

    def machine_texts(self) -> dict[str, bytes]:
        """Return the rows of :meth:`machines` as JSON, which a reader can compare."""
        rows = self._ledger.hgetall(names.MACHINES)
        return {name.decode(): text for name, text in rows.items()}

    def pools(self) -> dict[str, dict[str, Any]]:
        """Return the published view of pools."""
        return self._rows(names.POOLS)

    def _rows(self, key: str) -> dict[str, dict[str, Any]]:
        rows = self._ledger.hgetall(key)
        return {name.decode(): json.loads(row) for name, row in sorted(rows.items())}


def _set_rows(ledger: RedisClient | Pipeline, key: str, rows: Mapping[str, Any]) -> None:
    if rows:
        ledger.hset(key, mapping={name: json.dumps(row) for name, row in rows.items()})


def _set_result(
    pipe: Pipeline,
    request: Mapping[str, Any],
    state: str,
    error: VcasgdError | None = None,
) -> None:
    why = {"problem": error and error.message, "remedy": error and error.remedy}
    row = {**request, "state": state, **why}
    pipe.set(names.request(request["id"]), json.dumps(row), ex=RESULT_SECONDS)
