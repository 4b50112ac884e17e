"""Middleware that gives each request an ID, for the response and all log lines about it.

It adds what else each response has.
"""

from __future__ import annotations

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vcasgd.logging import REQUEST_ID, bound

log = logging.getLogger(__name__)

#: Methods that change nothing; requests with others are logged.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
HEADER = "X-Request-ID"
#: A browser that guesses types could take text of a worker for a page or a script.
NO_SNIFFING = {"X-Content-Type-Options": "nosniff"}
#: Key of the ID in the ASGI scope, for handlers that run after the log's context has ended.
SCOPE_KEY = "vcasgd.request"


class RequestIds:
    """Middleware that accepts the ID of the request, or generates one.

    A proxy may send IDs that a log line can't hold; these are replaced, not refused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(HEADER, "")
        request = sent if REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
        scope[SCOPE_KEY] = request

        async def respond(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request
                headers.update(NO_SNIFFING)
                if scope["method"] not in SAFE_METHODS:
                    log.info("%s %s: %d", scope["method"], scope["path"], message["status"])
            await send(message)

        with bound(request=request):
            try:
                await self._app(scope, receive, respond)
            except Exception as error:
                # the server logs the traceback without the ID
                log.error("%s %s: %s", scope["method"], scope["path"], type(error).__name__)
                raise
