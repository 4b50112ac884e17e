"""Tokens that connections to servers need, and the connections that each has opened."""

from __future__ import annotations

import asyncio
import logging
import time

from vcasgd.errors import StoreError, Unauthorized
from vcasgd.gateway.crowd import Crowd
from vcasgd.spec.access import Scope
from vcasgd.store.ledger.api_tokens import ApiToken, ApiTokens, name_in

log = logging.getLogger(__name__)

#: Seconds between two readings of the tokens: how long connections outlive their token.
READ_SECONDS = 2.0
#: The same at least, for tokens that are not known.
MISS_SECONDS = 0.2


class Guests:
    """Checks tokens, and ends the connections of those that were revoked or have expired.

    ``crowd`` has the connections of guests by the digests of their tokens.
    """

    def __init__(self, tokens: ApiTokens, crowd: Crowd) -> None:
        self._tokens = tokens
        self.crowd = crowd
        self._known: dict[str, ApiToken] = {}
        self._read_at = float("-inf")
        self._missing = asyncio.Lock()

    async def watch(self) -> None:
        """Read the tokens until the task is cancelled. The last ones count while none can be."""
        while True:
            await self._refresh()
            await asyncio.sleep(READ_SECONDS)

    async def check(self, text: str) -> ApiToken:
        """Return the token with this text. Raises :class:`Unauthorized`."""
        token = self._find(text)
        if token is None:
            # It may have been created a moment ago. All that wait share one reading.
            asked_at = time.monotonic()
            async with self._missing:
                if self._read_at < asked_at:
                    await asyncio.sleep(max(0.0, self._read_at + MISS_SECONDS - asked_at))
                    await self._refresh()
            token = self._find(text)
        if token is None:
            raise Unauthorized("the token is wrong or was revoked")
        if token.scope is not Scope.JOIN:
            raise Unauthorized(f"the token has scope {token.scope}, not {Scope.JOIN}")
        if token.expired(time.time()):
            raise Unauthorized("the token has expired")
        return token

    def _find(self, text: str) -> ApiToken | None:
        token = self._known.get(name_in(text) or "")
        return token if token is not None and token.opened_by(text) else None

    async def _refresh(self) -> None:
        self._read_at = time.monotonic()
        try:
            self._known = await asyncio.to_thread(self._tokens.all)
        except StoreError as error:
            log.warning("the tokens can't be read: %s", error)
        now = time.time()
        valid = {each.digest for each in self._known.values() if not each.expired(now)}
        for digest in self.crowd.keys() - valid:
            log.info("a token has ended, and its %d connections", self.crowd.drop_all(digest))
