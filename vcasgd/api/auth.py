"""Who may ask: the bearer token or a session for everything but health and the description."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vcasgd.api.problems import problem_response
from vcasgd.api.requests import SAFE
from vcasgd.api.sessions import Sessions
from vcasgd.errors import ApiError, Forbidden, Unauthorized

#: no form and no link of another page can send it
PAGE_HEADER = "X-Vcasgd-Request"
PAGE_HEADER_VALUE = "dashboard"
#: where what collects metrics on this machine needs no token
METRICS = "/metrics"
#: by which a proxy says that it asks for somebody else
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host")


class Authentication:
    """Refuses requests under a prefix that carry neither the token nor a session.

    It stands before the routes: a stranger's body is never read, and a stranger can't tell a
    job that exists from one that doesn't. ``public``: pairs of method and path.
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
        if path == METRICS and _from_here(scope, headers):
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
        return None if method in SAFE else foreign(headers)

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # headers are latin-1 on the wire
        given = token.strip().encode("latin-1")
        return secrets.compare_digest(given, self._token) and scheme.lower() == "bearer"


def foreign(headers: Headers) -> Forbidden | None:
    """Why a request that a browser sent with our cookie is not our own page's."""
    if headers.get(PAGE_HEADER) != PAGE_HEADER_VALUE:
        return Forbidden(
            f"the header {PAGE_HEADER} is missing",
            remedy=f"send {PAGE_HEADER}: {PAGE_HEADER_VALUE}, or the bearer token",
        )
    return from_elsewhere(headers)


def from_elsewhere(headers: Headers) -> Forbidden | None:
    """As far as the browser says where it comes from."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    # the scheme is not compared: before a proxy that ends TLS it is another one than behind it
    ours = origin is None or _netloc(origin) == headers.get("host", "").lower()
    if ours and site in (None, "same-origin"):
        return None
    return Forbidden("the request comes from another site", remedy="use the dashboard itself")


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _from_here(scope: Scope, headers: Headers) -> bool:
    """Whether a process of this machine asks, and for itself."""
    client = scope.get("client")
    if client is None or any(name in headers for name in _FORWARDED):
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False
