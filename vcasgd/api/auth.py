"""One bearer token for everything but health and the description of the API."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vcasgd.api.problems import problem_response
from vcasgd.errors import Unauthorized


class BearerAuth:
    """Refuses requests under a prefix that don't carry the token.

    It stands before the routes: a stranger's body is never read, and a stranger can't tell a
    job that exists from one that doesn't.
    """

    def __init__(self, app: ASGIApp, *, token: str, prefix: str, public: frozenset[str]) -> None:
        self._app = app
        self._token = token.encode()
        self._prefix = prefix
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._guarded(scope) and not self._authorised(Headers(scope=scope)):
            error = Unauthorized(
                "the bearer token is missing or wrong",
                remedy="send the header: Authorization: Bearer <token>",
            )
            await problem_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _guarded(self, scope: Scope) -> bool:
        if scope["type"] not in ("http", "websocket"):
            return False
        path: str = scope["path"]
        return path.startswith(self._prefix) and path not in self._public

    def _authorised(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # headers are latin-1 on the wire
        given = token.strip().encode("latin-1")
        return secrets.compare_digest(given, self._token) and scheme.lower() == "bearer"
