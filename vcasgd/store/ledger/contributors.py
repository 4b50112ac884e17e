"""Contributors: people whose machines joined, and the nicknames that they chose.

A contributor is the random ID of a token's name. Snapshots count applied samples by it, and workers
can read snapshots, so it says nothing about the token. It outlives the token: a later one with the
same name belongs to the same contributor.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from vcasgd.errors import Conflict
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import LedgerKeys

#: Bytes of randomness in the ID of a contributor.
_ID_BYTES = 6


class Contributors:
    """Contributors to all jobs. Calls raise :class:`~vcasgd.errors.StoreUnavailable`, and can be
    repeated."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger
        self._nickname = ledger.script("ledger/nickname")

    def place(self, workers: Mapping[str, Mapping[str, str]]) -> None:
        """Record the contributors of new workers. ``workers``: job → worker → name of the token."""
        for job, tokens in workers.items():
            if tokens:
                rows = {worker: self._id_of(token) for worker, token in tokens.items()}
                self._ledger.hset(LedgerKeys(job).contributors, mapping=rows)

    def of_worker(self, job: str, worker: str) -> str | None:
        """Return the contributor of a worker's machine; None for a machine of the cluster."""
        found = self._ledger.hget(LedgerKeys(job).contributors, worker)
        return None if found is None else found.decode()

    def nicknames(self) -> dict[str, str]:
        """Return the nicknames by contributor, of those who have one."""
        rows = self._ledger.hgetall(names.NICKNAMES)
        return {contributor.decode(): nickname.decode() for contributor, nickname in rows.items()}

    def set_nickname(self, token: str, nickname: str) -> None:
        """Set the nickname of a token's contributor.

        Raises :class:`Conflict` if another person has it, or one that differs only in case,
        spaces, dashes, and underscores.
        """
        if not self._nickname(keys=[names.NICKNAMES], args=[self._id_of(token), nickname]):
            raise Conflict(
                f"another person has the nickname {nickname}",
                remedy="choose another one with --nickname",
                status=409,
                field="nickname",
            )

    def remove_nickname(self, token: str) -> None:
        """Remove the nickname of a token's contributor, who is anonymous from then on."""
        known = self._ledger.hget(names.CONTRIBUTORS, token)
        if known is not None:
            self._nickname(keys=[names.NICKNAMES], args=[known, ""])

    def _id_of(self, token: str) -> str:
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.hsetnx(names.CONTRIBUTORS, token, secrets.token_hex(_ID_BYTES))
            pipe.hget(names.CONTRIBUTORS, token)
            _, found = pipe.execute()
        return str(found.decode())
