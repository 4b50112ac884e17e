"""Callers: which token a request was sent with, and whether that token is still valid."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from anyio import CapacityLimiter, to_thread

from vcasgd.api.sessions import SessionContent, Sessions, mark_of
from vcasgd.errors import StoreError, Unauthorized
from vcasgd.spec.access import BOOTSTRAP, Scope
from vcasgd.steady_time import boot_time
from vcasgd.store.ledger.api_tokens import ApiToken, ApiTokens, name_in

log = logging.getLogger(__name__)

#: Key of the caller in the ASGI scope.
CALLER_KEY = "vcasgd.caller"
#: Seconds for which all requests share what the ledger contains, or why it is unavailable. A
#: revoked token works that much longer.
FRESH_SECONDS = 2.0
#: The same for a token that is not among these: another API process may just have created it.
MISS_SECONDS = 0.1
#: Seconds between two records of a token's use; an administrator looks for unused ones.
USE_SECONDS = 60.0
#: Threads that read tokens, so that a silent ledger can't occupy those of the routes.
_THREADS = CapacityLimiter(4)

_NEW_TOKEN = "ask an administrator for a new one: vcasgd token create NAME --scope SCOPE"


@dataclass(frozen=True)
class Caller:
    """Token that a request was sent with, also if a session stands for it."""

    name: str
    scope: Scope
    max_machines: int | None = None
    #: Unix time at which the token expires; None: never.
    expires_at: float | None = None
    #: Pool that machines with this token join; only with scope ``join``.
    pool: str | None = None
    #: Digest of the token's text; None for the bootstrap token, which never changes.
    digest: str | None = field(default=None, repr=False)
    #: Unix time at which the session ends; None without one.
    session_end: float | None = None


#: The stack's own token.
_BOOTSTRAP = Caller(BOOTSTRAP, Scope.ADMIN)


class Callers:
    """Finds the caller of a request. Requests with the bootstrap token don't read the ledger."""

    def __init__(self, bootstrap: str, tokens: ApiTokens, sessions: Sessions) -> None:
        self._bootstrap = bootstrap.encode()
        self._tokens = _CachedTokens(tokens)
        self._sessions = sessions

    async def of_token(self, text: str) -> Caller | None:
        """Return the caller with a token, None if it is wrong.

        Raises :class:`Unauthorized` if it has expired, and, for named tokens,
        :class:`~vcasgd.errors.StoreUnavailable`.
        """
        sent = text.strip()
        if secrets.compare_digest(sent.encode("utf-8", "surrogatepass"), self._bootstrap):
            return _BOOTSTRAP
        name = name_in(sent)
        token = await self._tokens.find(name, lambda each: each.opened_by(sent)) if name else None
        return await self._used(token) if token else None

    async def of_session(self, cookies: str) -> Caller | None:
        """Return the caller with a session in a ``Cookie`` header, None if there is none.

        Raises the errors of :meth:`of_token`, also if the session's token was revoked.
        """
        session = self._sessions.among(cookies)
        if session is None:
            return None
        if session.user == BOOTSTRAP:
            return replace(_BOOTSTRAP, session_end=session.end)
        token = await self._tokens.find(
            session.user, lambda each: mark_of(each.digest) == session.mark
        )
        if token is None:
            raise Unauthorized(f"the token {session.user} was revoked", remedy=_NEW_TOKEN)
        return replace(await self._used(token), session_end=session.end)

    def new_session(self, caller: Caller) -> str:
        """Return a cookie for a session that ends with its caller's token, or earlier."""
        return self._sessions.new(SessionContent(caller.name, mark_of(caller.digest or "")))

    def tokens_changed(self) -> None:
        """Take a change of the tokens into account at once, not after :data:`FRESH_SECONDS`."""
        self._tokens.expire()

    async def still_valid(self, caller: Caller) -> bool:
        """Return True if an earlier caller's token and session are still valid.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        if caller.session_end is not None and time.time() >= caller.session_end:
            return False
        if caller.digest is None:
            return True
        token = await self._tokens.find(caller.name, lambda each: each.digest == caller.digest)
        return token is not None and not token.expired(time.time())

    async def _used(self, token: ApiToken) -> Caller:
        if token.expired(time.time()):
            raise Unauthorized(f"the token {token.name} has expired", remedy=_NEW_TOKEN)
        await self._tokens.record_use(token)
        return Caller(
            token.name,
            token.scope,
            token.max_machines,
            token.expires_at,
            token.pool,
            token.digest,
        )


class _CachedTokens:
    """Tokens of the ledger, read at most once in :data:`FRESH_SECONDS` while nothing changes."""

    def __init__(self, tokens: ApiTokens) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()
        #: Start of the last reading, and time of the last change by this process.
        self._read_at = self._changed_at = float("-inf")
        self._known: Mapping[str, ApiToken] = {}
        self._error: StoreError | None = None
        #: Time of the last record of a use, by digest.
        self._recorded: dict[str, float] = {}

    async def find(self, name: str, fits: Callable[[ApiToken], bool]) -> ApiToken | None:
        """Return the token with a name if it fits, also if it has expired."""
        for max_seconds in (FRESH_SECONDS, MISS_SECONDS):
            token = await self._read(name, max_seconds)
            if token is not None and fits(token):
                return token
        return None

    def expire(self) -> None:
        """Read the tokens again before the next use, as this process has changed them."""
        self._changed_at = boot_time()

    async def record_use(self, token: ApiToken) -> None:
        """Record that a token is used, unless that was done recently."""
        now = time.monotonic()
        if now - self._recorded.get(token.digest, float("-inf")) < USE_SECONDS:
            return
        self._recorded[token.digest] = now
        try:
            record = partial(self._tokens.record_use, token.name)
            await to_thread.run_sync(record, abandon_on_cancel=True, limiter=_THREADS)
        except StoreError as error:
            log.warning("the use of token %s is not recorded: %s", token.name, error)

    async def _read(self, name: str, max_seconds: float) -> ApiToken | None:
        if not self._fresh(max_seconds):
            refresh = partial(self._refresh, max_seconds)
            await to_thread.run_sync(refresh, abandon_on_cancel=True, limiter=_THREADS)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._known.get(name)

    def _fresh(self, max_seconds: float) -> bool:
        unchanged = self._read_at > self._changed_at
        return unchanged and boot_time() - self._read_at < max_seconds

    def _refresh(self, max_seconds: float) -> None:
        with self._lock:
            if self._fresh(max_seconds):
                return
            start = boot_time()
            try:
                self._known, self._error = self._tokens.all(), None
                # tokens that are gone are forgotten, so that this stays as small as the others
                digests = {token.digest for token in self._known.values()}
                self._recorded = {d: at for d, at in self._recorded.items() if d in digests}
            except StoreError as error:
                self._error = error
                # many requests wait for the same answer, so the next one is due after a pause
                start = boot_time()
            self._read_at = start
