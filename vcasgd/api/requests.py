"""One id for each request: accepted or made up, sent back, and known to all that it leads to."""

from __future__ import annotations

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vcasgd.logging import REQUEST_ID, bound

log = logging.getLogger(__name__)

#: methods that change nothing
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
HEADER = "X-Request-ID"
#: where it is found after the request has failed and what was bound is gone
SCOPE_KEY = "vcasgd.request"


class RequestIds:
    """An id that could not stand in a log line is replaced, not refused: a proxy may have made
    it. Whatever may have changed something is logged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _accepted(Headers(scope=scope).get(HEADER, ""))
        scope[SCOPE_KEY] = request

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request
                if scope["method"] not in SAFE:
                    log.info("%s %s: %d", scope["method"], scope["path"], message["status"])
            await send(message)

        with bound(request=request):
            try:
                await self._app(scope, receive, answer)
            except Exception as error:
                # the server logs the traceback, without knowing whose it is
                log.error("%s %s: %s", scope["method"], scope["path"], type(error).__name__)
                raise


def _accepted(given: str) -> str:
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
