"""Sessions of the dashboard: what a cookie holds instead of the token.

A session is a time and a signature of it. Nobody keeps a list, so any process of the API knows
any session, also after a restart; another token ends all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

from starlette.responses import Response

COOKIE = "vcasgd_session"
#: a working day, so that a screen that was left behind does not stay open for ever
SESSION_SECONDS = 12 * 3600
#: makes two sessions of one second differ
NONCE_BYTES = 9


class Sessions:
    """Made and recognised by whoever has the token."""

    def __init__(self, token: str, clock: Callable[[], float] = time.time) -> None:
        # a key of its own: what is signed here is good for nothing else
        self._key = hmac.digest(token.encode(), b"vcasgd session", hashlib.sha256)
        self._clock = clock

    def new(self) -> str:
        """The value of a cookie that is good for :data:`SESSION_SECONDS`."""
        body = f"{int(self._clock()) + SESSION_SECONDS}.{secrets.token_urlsafe(NONCE_BYTES)}"
        return f"{body}.{self._signature(body)}"

    def valid(self, value: str) -> bool:
        body, _, signature = value.rpartition(".")
        given = signature.encode("utf-8", "surrogateescape")
        if not secrets.compare_digest(given, self._signature(body).encode()):
            return False
        return self._clock() < int(body.partition(".")[0])

    def among(self, cookies: str) -> bool:
        """Whether a ``Cookie`` header carries a valid one."""
        try:
            morsel = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return False
        return morsel is not None and self.valid(morsel.value)

    def _signature(self, body: str) -> str:
        signed = body.encode("utf-8", "surrogateescape")
        return hmac.new(self._key, signed, hashlib.sha256).hexdigest()


def set_cookie(response: Response, value: str, *, secure: bool) -> None:
    response.set_cookie(
        COOKIE, value, max_age=SESSION_SECONDS, secure=secure, httponly=True, samesite="strict"
    )


def clear_cookie(response: Response, *, secure: bool) -> None:
    response.delete_cookie(COOKIE, secure=secure, httponly=True, samesite="strict")
