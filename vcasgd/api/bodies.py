"""Limits for the bodies of requests, which apply before any of them is parsed."""

from __future__ import annotations

import asyncio

from starlette import status
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vcasgd.api.problems import problem_response
from vcasgd.errors import ApiError
from vcasgd.limits import MAX_BODY_BYTES, MAX_BODY_SECONDS, MAX_PUBLIC_BODY_BYTES


class BodyLimit:
    """Middleware that refuses slow and long bodies.

    Long ones are refused before they arrive if they have a ``Content-Length``, otherwise as soon as
    they are too long.

    ``public``: path of the route that reads a body without a token. Routes whose paths start with
    ``own`` have limits of their own.
    """

    def __init__(
        self, app: ASGIApp, *, public: str, own: str, seconds: float = MAX_BODY_SECONDS
    ) -> None:
        self._app = app
        self._seconds = seconds
        self._public = public
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(self._own):
            await self._app(scope, receive, send)
            return
        limit = MAX_PUBLIC_BODY_BYTES if scope["path"] == self._public else MAX_BODY_BYTES
        if int(Headers(scope=scope).get("content-length", "0")) > limit:
            error = ApiError(_reason(limit), status=status.HTTP_413_CONTENT_TOO_LARGE)
            await problem_response(error)(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, limit, self._seconds), send)


def _bounded(receive: Receive, limit: int, seconds: float) -> Receive:
    received = 0
    deadline: float | None = asyncio.get_running_loop().time() + seconds

    async def bounded() -> Message:
        nonlocal received, deadline
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(
                status.HTTP_408_REQUEST_TIMEOUT,
                f"no complete body within {seconds:g} s",
            ) from None
        if not message.get("more_body"):
            # what is awaited next is the end of the connection
            deadline = None
        received += len(message.get("body", b""))
        if received > limit:
            # FastAPI passes on only errors of this class
            raise HTTPException(status.HTTP_413_CONTENT_TOO_LARGE, _reason(limit))
        return message

    return bounded


def _reason(limit: int) -> str:
    return f"the body is longer than {limit / 1e3:g} kB"
