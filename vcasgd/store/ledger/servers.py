"""Parameter servers and the controller, as the ledger knows them: tokens, leases, commands."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vcasgd.errors import SpecError
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient

#: random part of a parameter server's token; see ``scripts/ledger/new_token.lua``
NONCE_BITS = 20


def node_name(number: int) -> str:
    """What a store node is called, in the ledger and to people."""
    return f"node-{number}"


class Servers:
    """Parameter servers: each start gets a token that is newer than all before, and that
    nobody else has, even where the ledger went back to an older state."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._new_token = ledger.script("ledger/new_token")

    def new_token(self, node: str) -> int:
        nonce = secrets.randbelow(1 << NONCE_BITS)
        return int(self._new_token(keys=[names.SERVER_TOKENS], args=[node, nonce]))

    def beat(self, node: str, description: Mapping[str, Any]) -> None:
        self._ledger.hset(names.SERVERS, node, json.dumps(description))

    def all(self) -> dict[str, dict[str, Any]]:
        found = self._ledger.hgetall(names.SERVERS)
        return {node.decode(): json.loads(each) for node, each in found.items()}


@dataclass(frozen=True)
class Pool:
    """What is remembered of a pool, or of one of its markets: launches whose outcome is known,
    refusals in a row, and until when it is left alone."""

    launches: int = 0
    failures: int = 0
    blocked_until: float = 0.0
    reason: str | None = None
    #: of the first refusal in a row
    refused_since: float | None = None
    #: so many machines the account may have, as far as the last refusal tells
    quota: int | None = None
    #: machines in a row that never joined, and when the last one was given up
    stillborn: int = 0
    given_up_at: float = 0.0


class Control:
    """The controller's lease, what it shows, and what it is asked to do."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._control = ledger.script("ledger/control")

    def claim(self, cluster: str) -> None:
        """The ledger is that of the first cluster that says so; two in one would end each other's
        machines and work on each other's jobs. May be repeated.

        Raises :class:`~vcasgd.errors.SpecError` where it is another one's.
        """
        if self._ledger.set(names.CLUSTER, cluster, nx=True):
            return
        owner = (self._ledger.get(names.CLUSTER) or b"").decode()
        if owner != cluster:
            raise SpecError(
                f"VCASGD_CLUSTER: the ledger is that of cluster {owner}, and not of {cluster}",
                remedy=f"give each cluster servers of its own, or set VCASGD_CLUSTER={owner}",
                field="VCASGD_CLUSTER",
            )

    def hold(self, owner: str, lease_seconds: float) -> int:
        """Takes or renews the lease; returns its token, 0 where somebody else holds it."""
        answer = self._control(keys=[names.CONTROLLER], args=[owner, int(lease_seconds * 1000)])
        return int(answer)

    def held(self) -> bool:
        """Whether a controller is at work, by the ledger's clock."""
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.hget(names.CONTROLLER, "deadline")
            pipe.time()
            deadline, (seconds, microseconds) = pipe.execute()
        now: int = seconds * 1000 + microseconds // 1000
        return int(deadline or 0) > now

    def note_look(self) -> None:
        """The controller has looked at the fleet, and shown what it could see."""
        self._ledger.hset(names.CONTROLLER, "looked_at", time.time())

    def looked_at(self) -> float:
        """Unix seconds of its own clock; 0 where it never did."""
        return float(self._ledger.hget(names.CONTROLLER, "looked_at") or 0.0)

    def request(self, kind: str, **details: Any) -> None:
        """Asks the controller for something; it is done once, soon."""
        self._ledger.rpush(names.COMMANDS, json.dumps({"kind": kind, **details}))

    def take_requests(self, most: int = 100) -> list[dict[str, Any]]:
        """Removes and returns what was asked. Lost if the controller dies right here, which
        is why only repeatable wishes travel this way; states are in the jobs' records."""
        found = self._ledger.lpop(names.COMMANDS, most)
        return [json.loads(each) for each in found or []]

    def show(self, instances: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        """Replaces what others see of the fleet."""
        with self._ledger.pipeline(transaction=True) as pipe:
            for key, rows in ((names.INSTANCES, instances), (names.POOLS, pools)):
                pipe.delete(key)
                if rows:
                    pipe.hset(key, mapping={name: json.dumps(row) for name, row in rows.items()})
            pipe.execute()

    def pool(self, name: str) -> Pool:
        """What is remembered of a pool from one controller to the next."""
        stored = self._ledger.hget(names.LAUNCHES, name)
        return Pool(**json.loads(stored)) if stored else Pool()

    def all_pools(self) -> dict[str, Pool]:
        """All that is remembered, also of markets."""
        found = self._ledger.hgetall(names.LAUNCHES)
        return {name.decode(): Pool(**json.loads(row)) for name, row in found.items()}

    def set_pool(self, name: str, pool: Pool) -> None:
        self._ledger.hset(names.LAUNCHES, name, json.dumps(asdict(pool)))

    def instances(self) -> dict[str, dict[str, Any]]:
        return self._rows(names.INSTANCES)

    def pools(self) -> dict[str, dict[str, Any]]:
        return self._rows(names.POOLS)

    def _rows(self, key: str) -> dict[str, dict[str, Any]]:
        found = self._ledger.hgetall(key)
        return {name.decode(): json.loads(row) for name, row in sorted(found.items())}
