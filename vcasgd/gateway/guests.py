"""Tokens that connections to servers need, and the connections that each has opened."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from vcasgd.errors import StoreError, Unauthorized
from vcasgd.spec.access import Scope
from vcasgd.store.ledger.api_tokens import ApiToken, ApiTokens, name_in

log = logging.getLogger(__name__)

#: Seconds between two readings of the tokens: how long connections outlive their token.
READ_SECONDS = 2.0
#: The same at least, for tokens that are not known.
MISS_SECONDS = 0.2
#: Most connections with one token: workers have about ten each.
MOST_CONNECTIONS = 2000


class Guests:
    """Checks tokens, and ends the connections of those that were revoked or have expired."""

    def __init__(self, tokens: ApiTokens) -> None:
        self._tokens = tokens
        self._known: dict[str, ApiToken] = {}
        self._read_at = float("-inf")
        self._missing = asyncio.Lock()
        self._tasks: defaultdict[str, set[asyncio.Task[None]]] = defaultdict(set)

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

    @contextmanager
    def connected(self, token: ApiToken) -> Iterator[None]:
        """Make the present task end with its token. Raises :class:`Unauthorized` at the limit."""
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        tasks = self._tasks[token.digest]
        if len(tasks) >= MOST_CONNECTIONS:
            raise Unauthorized(f"the token has {MOST_CONNECTIONS} connections, which is the limit")
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                self._tasks.pop(token.digest, None)

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
        for digest in self._tasks.keys() - valid:
            log.info("a token has ended, and its %d connections", len(self._tasks[digest]))
            for task in tuple(self._tasks[digest]):
                task.cancel()
