"""Open connections of one kind, within limits, and the tokens that those to servers need."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vcasgd.errors import StoreError, Unauthorized
from vcasgd.spec.access import Scope
from vcasgd.store.ledger.api_tokens import ApiToken, ApiTokens, name_in

log = logging.getLogger(__name__)

#: Seconds between two readings of the tokens: how long connections outlive their token.
READ_SECONDS = 2.0
#: The same at least, for tokens that are not known.
MISS_SECONDS = 0.2


class Crowd:
    """Connections of one kind, each served by a task, by a key of those who opened them.

    At a limit, a new connection takes the place of the one that has been silent for longest: of the
    same key, or else of the key with the most connections. So somebody who holds many, from few
    addresses or from many, closes their own and doesn't keep others out.
    """

    def __init__(self, limit: int, limit_of_key: int) -> None:
        self._limit = limit
        self._limit_of_key = limit_of_key
        #: Keys, and the tasks of each, from the longest silent one to the latest one.
        self._tasks: OrderedDict[str, OrderedDict[asyncio.Task[None], None]] = OrderedDict()
        self._open = 0
        #: Connections that made room for others.
        self.dropped = 0

    @contextmanager
    def member(self, key: str) -> Iterator[Callable[[int], None]]:
        """Count the present task's connection; cancel another one's task at a limit.

        Yield a function to call with the number of bytes whenever some were sent or received.
        """
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        tasks = self._tasks.setdefault(key, OrderedDict())
        tasks[task] = None
        self._tasks.move_to_end(key)
        self._open += 1
        if len(tasks) > self._limit_of_key:
            self._drop(key)
            self.dropped += 1
        elif self._open > self._limit:
            self._drop(max(self._tasks, key=lambda each: len(self._tasks[each])))
            self.dropped += 1

        def heard(_count: int) -> None:
            if task in tasks:
                tasks.move_to_end(task)
                self._tasks.move_to_end(key)

        try:
            yield heard
        finally:
            if task in tasks:
                self._forget(key, task)

    def keys(self) -> set[str]:
        """Return the keys that have connections."""
        return set(self._tasks)

    def drop_all(self, key: str) -> int:
        """Close the connections of a key. Return their number."""
        count = len(self._tasks.get(key, ()))
        for _ in range(count):
            self._drop(key)
        return count

    def _drop(self, key: str) -> None:
        task = next(iter(self._tasks[key]))
        self._forget(key, task)
        task.cancel()

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        del self._tasks[key][task]
        self._open -= 1
        if not self._tasks[key]:
            del self._tasks[key]


def address_key(address: str) -> str:
    """Return the part of an IP address that one visitor can't choose: of IPv6, its /64."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.version == 4:
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


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
