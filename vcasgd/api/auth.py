"""Authentication by bearer token or by the dashboard's session cookie."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vcasgd.api.access import refusal
from vcasgd.api.callers import CALLER_KEY, Caller, Callers
from vcasgd.api.middleware import SAFE_METHODS
from vcasgd.api.problems import problem_response
from vcasgd.errors import Forbidden, Unauthorized, VcasgdError
from vcasgd.spec.access import Scope as Access

#: Header of the dashboard's requests. Forms and links of other sites can't set it.
PAGE_HEADER = "X-Vcasgd-Request"
PAGE_HEADER_VALUE = "dashboard"
#: Path of the metrics; clients on this machine need no token for it.
METRICS = "/metrics"
#: Headers of a proxy that forwards the request of another client.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host")


class Authentication:
    """Middleware that refuses requests without a valid token or session.

    It runs before the routes: the API never reads the body of an unauthenticated request, and
    the response doesn't reveal whether a job exists. It guards paths that start with ``prefix``,
    except the pairs of method and path in ``public``. The routes find the caller in the ASGI scope,
    and check what it may do (:mod:`vcasgd.api.access`).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        callers: Callers,
        prefix: str,
        public: Collection[tuple[str, str]],
    ) -> None:
        self._app = app
        self._callers = callers
        self._prefix = prefix
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            if self._guards(scope, headers):
                try:
                    caller = scope[CALLER_KEY] = await self._caller(scope, headers)
                    # the metrics are no route, so nothing else checks this
                    if scope["path"] == METRICS and (error := refusal(caller, Access.READ)):
                        raise error
                except VcasgdError as refused:
                    await problem_response(refused)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _guards(self, scope: Scope, headers: Headers) -> bool:
        path = scope["path"]
        if path == METRICS:
            return not _is_local(scope, headers)
        public = (scope.get("method", "GET"), path) in self._public
        return path.startswith(self._prefix) and not public

    async def _caller(self, scope: Scope, headers: Headers) -> Caller:
        """Return the caller with the bearer token, or else with the session."""
        caller = await self._callers.of_token(_bearer_token(headers))
        if caller is not None:
            return caller
        caller = await self._callers.of_session(headers.get("cookie", ""))
        if caller is None:
            raise Unauthorized(
                "the bearer token is missing or wrong",
                remedy="send the header: Authorization: Bearer <token>",
            )
        if scope.get("method", "GET") not in SAFE_METHODS and (error := forgery(headers)):
            raise error
        return caller


def _bearer_token(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


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
    """Return True if a process of this machine sent the request to it, and not for another client.

    A page whose name resolves to this machine sends its own name as the host.
    """
    client = scope.get("client")
    if client is None or any(name in headers for name in _FORWARDED):
        return False
    host = _hostname(headers.get("host", ""))
    return _is_loopback(client[0]) and (host == "localhost" or _is_loopback(host))


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
