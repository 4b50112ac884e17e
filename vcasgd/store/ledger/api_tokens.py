"""API tokens in the ledger: names, scopes, digests of secrets, and last uses."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vcasgd.errors import Conflict, NotFound
from vcasgd.spec.access import Scope
from vcasgd.store import keys as names
from vcasgd.store.connection import RedisClient

log = logging.getLogger(__name__)

#: Most tokens; each API process keeps all of them in memory.
MAX_TOKENS = 1000
#: Seconds over which the uploads with a token are counted, from the first one on.
UPLOAD_SECONDS = 24 * 3600
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


def _read(name: str, row: bytes) -> ApiToken | None:
    """Return a stored token, or None if it can't be read: one must not disable all others."""
    try:
        return ApiToken.model_validate_json(row)
    except ValidationError:
        log.warning("the token %s can't be read", name)
        return None
