"""Parameter servers in the ledger: tokens, heartbeats, and reports of their shards."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys

#: Bits of the random part of a parameter server's token; see ``scripts/ledger/new_token.lua``.
NONCE_BITS = 20
#: Done subtasks in one call of the script, which blocks the ledger meanwhile; times the number of
#: shards, at most :data:`MAX_LOOKS`.
MAX_REPORTED, MAX_LOOKS = 1000, 4000
#: Blocks of an applied record in one call, 128 KiB.
MAX_BLOCKS_STORED = 256


def node_name(number: int) -> str:
    """Return the name of a store node, in the ledger and for people."""
    return f"node-{number}"


class Servers:
    """Tokens and heartbeats of parameter servers.

    Each start gets a token that is newer than all earlier ones and unique, even if the ledger was
    restored to an earlier state.
    """

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._new_token = ledger.script("ledger/new_token")

    def new_token(self, node: str) -> int:
        """Return a new token for the parameter server of a store node."""
        nonce = secrets.randbelow(1 << NONCE_BITS)
        return int(self._new_token(keys=[names.SERVER_TOKENS], args=[node, nonce]))

    def newest_token(self, node: str) -> int:
        """Return the newest token of a store node's parameter servers, 0 before the first."""
        return int(self._ledger.hget(names.SERVER_TOKENS, node) or 0)

    def beat(self, node: str, description: Mapping[str, Any]) -> None:
        """Store the heartbeat of a store node's parameter server."""
        self._ledger.hset(names.SERVERS, node, json.dumps(description))

    def all(self) -> dict[str, dict[str, Any]]:
        """Return the last heartbeat of each store node's parameter server."""
        rows = self._ledger.hgetall(names.SERVERS)
        return {node.decode(): json.loads(row) for node, row in rows.items()}


class Accounts:
    """Reports of a parameter server about its shard. Every call is idempotent.

    Raises :class:`~vcasgd.errors.Fenced` after a newer parameter server of the shard has reported.
    """

    def __init__(self, ledger: RedisClient, job: str, shard: int = 0, shards: int = 1) -> None:
        self._ledger = ledger
        self._shard, self._shards = shard, shards
        keys = LedgerKeys(job)
        self._reports = keys.shards
        self._keys = [keys.work, keys.leases, keys.holders, keys.open, keys.evaluations,
                      keys.shards, keys.blocks, keys.counters]  # fmt: skip
        self._record_keys = [keys.work, keys.shards, keys.blocks]
        self._account = ledger.script("ledger/account")
        self._store_record = ledger.script("ledger/store_record")
        self._reconcile = ledger.script("ledger/reconcile")

    def newest_token(self) -> int:
        """Return the newest token of a parameter server that has reported; 0 before the first."""
        return int(self._ledger.hget(self._reports, f"{self._shard}:token") or 0)

    def reported_version(self) -> int:
        """Return the version of the last report; 0 before the first."""
        return int(self._ledger.hget(self._reports, f"{self._shard}:version") or 0)

    def account(
        self,
        token: int,
        version: int,
        finished: int,
        totals: str,
        done: Sequence[int],
        *,
        samples: int = 0,
        point: int = 0,
    ) -> bool:
        """Report newly done subtasks and the number of finished epochs, up to a version.

        ``samples`` are applied, and ``point`` is the newest evaluation point. Many subtasks take
        several calls of the script; after an error, repeat the report. Returns False if the ledger
        already has a newer report.
        """
        head = [self._shard, self._shards, token, version, finished, totals, samples, point]
        # The script looks at each subtask in each shard.
        step = max(1, min(MAX_REPORTED, MAX_LOOKS // self._shards))
        parts = [done[at : at + step] for at in range(0, len(done), step)] or [()]
        return all(self._account(keys=self._keys, args=[*head, *part]) for part in parts)

    def reconcile(
        self,
        token: int,
        version: int,
        finished: int,
        totals: str,
        done: Mapping[int, bytes],
        *,
        samples: int = 0,
        point: int = 0,
        initialise: bool = False,
    ) -> None:
        """Report the whole applied record; work that it lacks is leased again.

        ``done`` are the blocks of a :class:`~vcasgd.learning.applied_record.SubtaskSet`, and
        ``initialise``: the first snapshot must be created again. The others are those of
        :meth:`account`. It takes several calls of scripts; after an error, repeat it.
        """
        blocks = list(done.items())
        for at in range(0, len(blocks), MAX_BLOCKS_STORED):
            part = [each for pair in blocks[at : at + MAX_BLOCKS_STORED] for each in pair]
            self._store_record(keys=self._record_keys, args=[self._shard, token, *part])
        head = [self._shard, self._shards, token, version, finished, totals, samples, point]
        self._reconcile(keys=self._keys, args=[*head, int(initialise), *done])
