"""Authentication by bearer token or by the dashboard's session cookie."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from itsdangerous import BadSignature, TimestampSigner
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vcasgd.api.problems import problem_response
from vcasgd.api.request_ids import SAFE_METHODS
from vcasgd.errors import ApiError, Forbidden, Unauthorized

COOKIE = "vcasgd_session"
#: Lifetime of a session: a working day, so that an unattended screen does not stay signed in.
SESSION_SECONDS = 12 * 3600
#: Bytes of randomness that make any two sessions differ.
NONCE_BYTES = 9
#: Header of the dashboard's requests. Forms and links of other sites can't set it.
PAGE_HEADER = "X-Vcasgd-Request"
PAGE_HEADER_VALUE = "dashboard"
#: Path of the metrics; clients on this machine need no token for it.
METRICS = "/metrics"
#: Headers of a proxy that forwards the request of another client.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host")


class Sessions:
    """Signed session cookies.

    A cookie holds the time of the sign-in and a signature with a key derived from the token. The
    API keeps no list, so sessions survive its restart; another token ends all of them.
    """

    def __init__(self, token: str) -> None:
        # the salt separates the key from any other use of the token
        self._signer = TimestampSigner(token, "vcasgd session", digest_method=hashlib.sha256)

    def new(self) -> str:
        """Return a cookie that is valid for :data:`SESSION_SECONDS`."""
        return self._signer.sign(secrets.token_urlsafe(NONCE_BYTES)).decode()

    def valid(self, cookie: str) -> bool:
        """Return True if the API signed the cookie and it has not expired."""
        signed = cookie.encode("utf-8", "surrogateescape")
        try:
            _, start = self._signer.unsign(signed, return_timestamp=True)
        except BadSignature:
            return False
        # no max_age: it refuses sessions from another API whose clock is slightly ahead
        return time.time() < start.timestamp() + SESSION_SECONDS

    def among(self, cookies: str) -> bool:
        """Return True if a ``Cookie`` header contains a valid session."""
        try:
            morsel = SimpleCookie(cookies).get(COOKIE)
        except CookieError:
            return False
        return morsel is not None and self.valid(morsel.value)


def set_cookie(response: Response, value: str, *, secure: bool) -> None:
    """Add the session cookie to a response. ``secure``: browsers send it over TLS only."""
    response.set_cookie(
        COOKIE, value, max_age=SESSION_SECONDS, secure=secure, httponly=True, samesite="strict"
    )


def clear_cookie(response: Response, *, secure: bool) -> None:
    """Delete the session cookie."""
    response.delete_cookie(COOKIE, secure=secure, httponly=True, samesite="strict")


class Authentication:
    """Middleware that refuses requests without a token or a session.

    It runs before the routes: the API never reads the body of an unauthenticated request, and
    the response doesn't reveal whether a job exists. It guards paths that start with ``prefix``,
    except the pairs of method and path in ``public``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str,
        sessions: Sessions,
        prefix: str,
        public: Collection[tuple[str, str]],
    ) -> None:
        self._app = app
        self._token = token.encode()
        self._sessions = sessions
        self._prefix = prefix
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if error is not None:
            await problem_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        path, method, headers = scope["path"], scope.get("method", "GET"), Headers(scope=scope)
        if path == METRICS and _is_local(scope, headers):
            return None
        if path != METRICS and not path.startswith(self._prefix):
            return None
        if (method, path) in self._public or self._has_token(headers):
            return None
        if not self._sessions.among(headers.get("cookie", "")):
            return Unauthorized(
                "the bearer token is missing or wrong",
                remedy="send the header: Authorization: Bearer <token>",
            )
        return None if method in SAFE_METHODS else forgery(headers)

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # headers are latin-1 on the wire
        sent = token.strip().encode("latin-1")
        return secrets.compare_digest(sent, self._token) and scheme.lower() == "bearer"


def forgery(headers: Headers) -> Forbidden | None:
    """Return the error for a request with a cookie that the dashboard didn't send, or None."""
    if headers.get(PAGE_HEADER) != PAGE_HEADER_VALUE:
        return Forbidden(
            f"the header {PAGE_HEADER} is missing",
            remedy=f"send {PAGE_HEADER}: {PAGE_HEADER_VALUE}, or the bearer token",
        )
    return cross_site(headers)


def cross_site(headers: Headers) -> Forbidden | None:
    """Return the error for a request that a page of another site sent, or None."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    # schemes are not compared: they differ in front of and behind a proxy that terminates TLS
    same_origin = origin is None or _netloc(origin) == headers.get("host", "").lower()
    if same_origin and site in (None, "same-origin"):
        return None
    return Forbidden("the request comes from another site", remedy="use the dashboard itself")


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _is_local(scope: Scope, headers: Headers) -> bool:
    """Return True if a process of this machine sent the request, and not for another client."""
    client = scope.get("client")
    if client is None or any(name in headers for name in _FORWARDED):
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
