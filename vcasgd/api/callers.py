"""Callers: which token a request was sent with, and whether that token is still valid.

The dashboard signs in with a token once, and has a cookie for it from then on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from http.cookies import CookieError, SimpleCookie
from typing import NamedTuple

from itsdangerous import BadData, URLSafeTimedSerializer

from vcasgd.errors import StoreError, Unauthorized
from vcasgd.spec.access import BOOTSTRAP, Scope
from vcasgd.store.ledger.api_tokens import ApiToken, ApiTokens, KnownTokens, name_in

log = logging.getLogger(__name__)

#: Key of the caller in the ASGI scope.
CALLER_KEY = "vcasgd.caller"
#: Seconds between two records of a token's use; an administrator looks for unused ones.
USE_SECONDS = 60.0

_NEW_TOKEN = "ask an administrator for a new one: vcasgd token create NAME --scope SCOPE"


class Caller(ApiToken):
    """Token that a request was sent with, also if a sign-in stands for it."""

    #: Unix time at which the sign-in ends; None without one.
    sign_in_end: float | None = None


#: The stack's own token. It never changes, so its digest isn't needed.
_BOOTSTRAP = Caller(name=BOOTSTRAP, scope=Scope.ADMIN, digest="", created_at=0.0)


# -- sign-ins of the dashboard ------------------------------------------------------------------

COOKIE = "vcasgd_sign_in"
#: Lifetime of a sign-in: a working day, so that an unattended screen does not stay signed in.
SIGN_IN_SECONDS = 12 * 3600
#: Hexadecimal digits of a token's digest in its sign-ins. They only have to differ from those of
#: an earlier token with the same name, as the cookie is signed.
MARK_DIGITS = 16


class CookieContent(NamedTuple):
    """A token's name, the start of its digest, and the Unix time of the end."""

    user: str
    mark: str
    end: float


class SignIns:
    """Signed cookies.

    A cookie holds the name of its token, the time of the sign-in, and a signature with a key
    derived from the stack's own token. The API keeps no list, so sign-ins survive its restart; a
    new token of the stack ends all of them, and revoking a named token ends its own.
    """

    def __init__(self, token: str) -> None:
        # the salt separates the key from any other use of the token
        self._signer = URLSafeTimedSerializer(
            token, "vcasgd sign-in", signer_kwargs={"digest_method": hashlib.sha256}
        )

    def new(self, token: ApiToken = _BOOTSTRAP) -> str:
        """Return a cookie that is valid for :data:`SIGN_IN_SECONDS`."""
        return str(self._signer.dumps([token.name, token.digest[:MARK_DIGITS]]))

    def read(self, cookie: str) -> CookieContent | None:
        """Return a sign-in that the API signed and that has not ended, or None."""
        signed = cookie.encode("utf-8", "surrogateescape")
        try:
            (user, mark), start = self._signer.loads(signed, return_timestamp=True)
        except BadData:
            return None
        # no max_age: it refuses sign-ins at another API whose clock is slightly ahead
        end = start.timestamp() + SIGN_IN_SECONDS
        return CookieContent(user, mark, end) if time.time() < end else None

    def among(self, cookies: str) -> CookieContent | None:
        """Return the valid sign-in in a ``Cookie`` header, or None."""
        try:
            morsel = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return None
        return None if morsel is None else self.read(morsel.value)


# -- callers ------------------------------------------------------------------------------------


class Callers:
    """Finds the caller of a request. Requests with the bootstrap token don't read the ledger."""

    def __init__(self, bootstrap: str, tokens: ApiTokens) -> None:
        self._bootstrap = bootstrap.encode()
        self._stored = tokens
        self._tokens = KnownTokens(tokens)
        #: Time of the last record of a use, by digest.
        self._recorded: dict[str, float] = {}
        self.sign_ins = SignIns(bootstrap)

    async def of_token(self, text: str) -> Caller | None:
        """Return the caller with a token, None if it is wrong.

        Raises :class:`Unauthorized` if it has expired, and, for named tokens,
        :class:`~vcasgd.errors.StoreUnavailable`.
        """
        sent = text.strip()
        if secrets.compare_digest(sent.encode("utf-8", "surrogatepass"), self._bootstrap):
            return _BOOTSTRAP
        name = name_in(sent)
        token = await self._tokens.find(name, lambda one: one.opened_by(sent)) if name else None
        return await self._used(token) if token else None

    async def of_cookies(self, cookies: str) -> Caller | None:
        """Return the caller with a sign-in in a ``Cookie`` header, None if there is none.

        Raises the errors of :meth:`of_token`, also if the sign-in's token was revoked.
        """
        sign_in = self.sign_ins.among(cookies)
        if sign_in is None:
            return None
        caller = _BOOTSTRAP
        if sign_in.user != BOOTSTRAP:
            token = await self._tokens.find(
                sign_in.user, lambda one: one.digest[:MARK_DIGITS] == sign_in.mark
            )
            if token is None:
                raise Unauthorized(f"the token {sign_in.user} was revoked", remedy=_NEW_TOKEN)
            caller = await self._used(token)
        return caller.model_copy(update={"sign_in_end": sign_in.end})

    def tokens_changed(self) -> None:
        """Take a change of the tokens into account at once."""
        self._tokens.expire()

    async def still_valid(self, caller: Caller) -> bool:
        """Return True if an earlier caller's token and sign-in are still valid.

        Raises :class:`~vcasgd.errors.StoreUnavailable`.
        """
        if caller.sign_in_end is not None and time.time() >= caller.sign_in_end:
            return False
        if caller.name == BOOTSTRAP:
            return True
        token = await self._tokens.find(caller.name, lambda one: one.digest == caller.digest)
        return token is not None and not token.expired(time.time())

    async def _used(self, token: ApiToken) -> Caller:
        if token.expired(time.time()):
            raise Unauthorized(f"the token {token.name} has expired", remedy=_NEW_TOKEN)
        await self._record_use(token)
        return Caller(**dict(token))

    async def _record_use(self, token: ApiToken) -> None:
        """Record that a token is used, unless that was done recently."""
        now = time.monotonic()
        if now - self._recorded.get(token.digest, float("-inf")) < USE_SECONDS:
            return
        recent = {each: at for each, at in self._recorded.items() if now - at < USE_SECONDS}
        self._recorded = {**recent, token.digest: now}
        try:
            await asyncio.to_thread(self._stored.record_use, token.name)
        except StoreError as error:
            log.warning("the use of token %s is not recorded: %s", token.name, error)
