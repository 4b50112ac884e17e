"""API tokens in the ledger: names, scopes, digests of secrets, and last uses."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vcasgd.errors import Conflict, NotFound, StoreError
from vcasgd.spec.access import Scope
from vcasgd.steady_time import boot_time
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient

log = logging.getLogger(__name__)

#: Most tokens; each API process keeps all of them in memory.
MAX_TOKENS = 1000
#: Seconds over which the uploads with a token are counted, from the first one on.
UPLOAD_SECONDS = 24 * 3600
#: Seconds for which all requests to a process share what the ledger contains. A revoked token works
#: that much longer.
FRESH_SECONDS = 2.0
#: The same at least, for tokens that are not among these.
MISS_SECONDS = 0.1
#: Bytes of a secret. 256 random bits can't be found by trying, so a plain SHA-256 protects them as
#: well as a slow password hash would.
SECRET_BYTES = 32
#: Text of a token. The prefix lets scanners of source code find it; the name finds its entry.
_TEXT = re.compile(rf"vcasgd_([a-z0-9-]{{1,40}})_[0-9a-f]{{{2 * SECRET_BYTES}}}")


class ApiToken(BaseModel):
    """Stored API token. Times are Unix seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    scope: Scope
    #: SHA-256 of the token's text, in hexadecimal.
    digest: str = Field(repr=False)
    created_at: float
    expires_at: float | None = None
    #: Most machines that the jobs of this user have together; with scope ``join``, that join.
    max_machines: int | None = None
    #: Most USD that the machines of this user's jobs cost in a calendar month (UTC).
    max_usd_per_month: float | None = None
    #: Pool that machines join; only with scope ``join``.
    pool: str | None = None

    def expired(self, now: float) -> bool:
        """Return True if the token is no longer valid at ``now`` (Unix seconds)."""
        return self.expires_at is not None and now >= self.expires_at

    def opened_by(self, text: str) -> bool:
        """Return True if ``text`` is this token. The comparison takes constant time."""
        return secrets.compare_digest(secret_digest(text), self.digest)


def secret_digest(text: str) -> str:
    """Return the digest under which a token or another secret is stored."""
    return hashlib.sha256(text.encode()).hexdigest()


def name_in(text: str) -> str | None:
    """Return the name in the text of a token; None if it has not the form of one."""
    match = _TEXT.fullmatch(text)
    return match[1] if match else None


class ApiTokens:
    """All API tokens. Calls raise :class:`~vcasgd.errors.StoreUnavailable`."""

    def __init__(self, ledger: RedisClient) -> None:
        self._ledger = ledger

    def create(
        self,
        name: str,
        scope: Scope,
        *,
        max_machines: int | None = None,
        max_usd_per_month: float | None = None,
        lifetime: float | None = None,
        pool: str | None = None,
    ) -> tuple[ApiToken, str]:
        """Create a token, and return it with its text, which is stored nowhere.

        ``lifetime`` is in seconds. Raises :class:`Conflict` if the name is taken, or if there are
        :data:`MAX_TOKENS`.
        """
        text = f"vcasgd_{name}_{secrets.token_hex(SECRET_BYTES)}"
        now = time.time()
        token = ApiToken(
            name=name,
            scope=scope,
            digest=secret_digest(text),
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
            max_machines=max_machines,
            max_usd_per_month=max_usd_per_month,
            pool=pool,
        )
        if self._ledger.hlen(names.API_TOKENS) >= MAX_TOKENS:
            raise Conflict(
                f"there are {MAX_TOKENS} tokens, which is the limit",
                remedy="revoke unused ones; vcasgd token list shows when each was last used",
            )
        if not self._ledger.hsetnx(names.API_TOKENS, name, token.model_dump_json()):
            raise Conflict(
                f"there is a token {name} already",
                remedy=f"choose another name, or run vcasgd token revoke {name} first",
            )
        # a use of an earlier token with this name may have been recorded after it was revoked
        self._ledger.hdel(names.API_TOKEN_USES, name)
        return token, text

    def all(self) -> dict[str, ApiToken]:
        """Return all tokens by name, without those that can't be read, also expired ones."""
        rows = self._ledger.hgetall(names.API_TOKENS)
        tokens = (_read(name.decode(), row) for name, row in sorted(rows.items()))
        return {token.name: token for token in tokens if token is not None}

    def last_uses(self) -> dict[str, float]:
        """Return the time of the last recorded use of each token that was used."""
        uses = self._ledger.hgetall(names.API_TOKEN_USES)
        return {name.decode(): float(at) for name, at in uses.items()}

    def count_upload(self, name: str, size: int) -> int:
        """Add to the bytes that a token uploads within a day, and return them.

        Take those of an upload that is not stored back with a negative ``size``.
        """
        key = names.uploads(name)
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.incrby(key, size)
            pipe.expire(key, UPLOAD_SECONDS, nx=True)
            total, _ = pipe.execute()
        return int(total)

    def record_use(self, name: str) -> None:
        """Record that a token is used now."""
        self._ledger.hset(names.API_TOKEN_USES, name, time.time())

    def revoke(self, name: str) -> None:
        """Delete a token. Raises :class:`NotFound`."""
        with self._ledger.pipeline(transaction=True) as pipe:
            pipe.hdel(names.API_TOKENS, name)
            pipe.hdel(names.API_TOKEN_USES, name)
            existed, _ = pipe.execute()
        if not existed:
            raise NotFound(f"there is no token {name}", remedy="vcasgd token list shows all")


class KnownTokens:
    """Tokens as of the last reading, which all requests to a process share."""

    def __init__(self, tokens: ApiTokens) -> None:
        self._tokens = tokens
        self._lock = asyncio.Lock()
        #: Start of the last reading, and time of the last change by this process.
        self._read_at = self._changed_at = float("-inf")
        self._known: Mapping[str, ApiToken] = {}
        self._error: StoreError | None = None

    async def find(
        self, name: str, fits: Callable[[ApiToken], bool], *, outdated: bool = False
    ) -> ApiToken | None:
        """Return the token with a name if it fits, also if it has expired.

        Raises :class:`StoreError` while the ledger can't be read, unless the last reading has a
        token that fits, and may be ``outdated``.
        """
        asked_at = boot_time()
        # One that is missing may have been created a moment ago.
        for since in (asked_at - FRESH_SECONDS, asked_at):
            token = (await self.all(since)).get(name)
            found = token if token is not None and fits(token) else None
            if self._error is not None and not (outdated and found):
                raise self._error.with_traceback(None)
            if found is not None:
                return found
        return None

    async def all(self, since: float) -> Mapping[str, ApiToken]:
        """Return the tokens by name, of a reading that began at ``since`` (boot time) or later."""
        since = max(since, self._changed_at)
        if self._read_at < since:
            async with self._lock:
                # All that wait share one reading.
                if self._read_at < since:
                    await asyncio.sleep(max(0.0, self._read_at + MISS_SECONDS - boot_time()))
                    await self._read()
        return self._known

    def expire(self) -> None:
        """Read the tokens again before the next use, as this process has changed them."""
        self._changed_at = boot_time()

    async def _read(self) -> None:
        start = boot_time()
        try:
            self._known, self._error = await asyncio.to_thread(self._tokens.all), None
        except StoreError as error:
            log.warning("the tokens can't be read: %s", error)
            self._error = error
            # Many requests wait for the same answer, so the next one is due after a pause.
            start = boot_time()
        self._read_at = start


def _read(name: str, row: bytes) -> ApiToken | None:
    """Return a stored token, or None if it can't be read: one must not disable all others."""
    try:
        return ApiToken.model_validate_json(row)
    except ValidationError:
        log.warning("the token %s can't be read", name)
        return None
