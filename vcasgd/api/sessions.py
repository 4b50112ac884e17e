"""Session cookies of the dashboard."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from itsdangerous import BadSignature, TimestampSigner
from starlette.responses import Response

from vcasgd.spec.access import BOOTSTRAP

COOKIE = "vcasgd_session"
#: Lifetime of a session: a working day, so that an unattended screen does not stay signed in.
SESSION_SECONDS = 12 * 3600
#: Bytes of randomness that make any two sessions differ.
NONCE_BYTES = 9
#: Hexadecimal digits of a token's digest in its sessions. They only have to differ from those of
#: an earlier token with the same name, as the cookie is signed.
MARK_DIGITS = 16
_CONTENT = re.compile(r"[A-Za-z0-9_-]+(?:~([a-z0-9-]+)~([0-9a-f]+))?")


@dataclass(frozen=True)
class SessionContent:
    """Content of a session: the token's name, and its :func:`mark_of`."""

    user: str = BOOTSTRAP
    mark: str = ""
    #: Unix time.
    end: float = 0.0


def mark_of(digest: str) -> str:
    """Return the part of a token's digest that its sessions contain."""
    return digest[:MARK_DIGITS]


class Sessions:
    """Signed session cookies.

    A cookie holds the name of its token, the time of the sign-in, and a signature with a key
    derived from the stack's own token. The API keeps no list, so sessions survive its restart; a
    new token of the stack ends all of them, and revoking a named token ends its own.
    """

    def __init__(self, token: str) -> None:
        # the salt separates the key from any other use of the token
        self._signer = TimestampSigner(token, "vcasgd session", digest_method=hashlib.sha256)

    def new(self, session: SessionContent | None = None) -> str:
        """Return a cookie that is valid for :data:`SESSION_SECONDS`."""
        content = secrets.token_urlsafe(NONCE_BYTES)
        if session is not None and session.user != BOOTSTRAP:
            content += f"~{session.user}~{session.mark}"
        return self._signer.sign(content).decode()

    def read(self, cookie: str) -> SessionContent | None:
        """Return a session that the API signed and that has not ended, or None."""
        signed = cookie.encode("utf-8", "surrogateescape")
        try:
            content, start = self._signer.unsign(signed, return_timestamp=True)
        except BadSignature:
            return None
        # no max_age: it refuses sessions from another API whose clock is slightly ahead
        end = start.timestamp() + SESSION_SECONDS
        match = _CONTENT.fullmatch(content.decode(errors="replace"))
        if match is None or time.time() >= end:
            return None
        return SessionContent(match[1] or BOOTSTRAP, match[2] or "", end)

    def among(self, cookies: str) -> SessionContent | None:
        """Return the valid session in a ``Cookie`` header, or None."""
        try:
            morsel = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return None
        return None if morsel is None else self.read(morsel.value)


def set_cookie(response: Response, value: str, *, secure: bool) -> None:
    """Add the session cookie to a response. ``secure``: browsers send it over TLS only."""
    response.set_cookie(
        COOKIE, value, max_age=SESSION_SECONDS, secure=secure, httponly=True, samesite="strict"
    )


def clear_cookie(response: Response, *, secure: bool) -> None:
    """Delete the session cookie."""
    response.delete_cookie(COOKIE, secure=secure, httponly=True, samesite="strict")
