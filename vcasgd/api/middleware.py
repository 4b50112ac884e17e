"""Middleware: IDs of requests, and limits for bodies and for requests in progress."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus

from starlette import status
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vcasgd.api.callers import CALLER_KEY
from vcasgd.api.problems import HEADER, NO_SNIFFING, SCOPE_KEY, problem_response
from vcasgd.errors import ApiError, Overloaded, VcasgdError
from vcasgd.limits import (
    MAX_BODY_BYTES,
    MAX_BODY_SECONDS,
    MAX_PUBLIC_BODY_BYTES,
    MAX_REQUESTS,
    MAX_REQUESTS_PER_TOKEN,
    MAX_STREAMS,
    MAX_STREAMS_PER_TOKEN,
)
from vcasgd.logging import REQUEST_ID, bound

log = logging.getLogger(__name__)

#: Methods that change nothing; requests with others are logged.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
#: Characters of a path in the log.
MAX_LOGGED_PATH = 200


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
                # Strangers could replace all of the log, which begins again when it is long.
                if scope["method"] not in SAFE_METHODS and CALLER_KEY in scope:
                    path = scope["path"][:MAX_LOGGED_PATH]
                    log.info("%s %s: %d", scope["method"], path, message["status"])
            await send(message)

        with bound(request=request):
            try:
                await self._app(scope, receive, respond)
            except Exception as error:
                # the server logs the traceback without the ID
                path = scope["path"][:MAX_LOGGED_PATH]
                log.error("%s %s: %s", scope["method"], path, type(error).__name__)
                raise


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
                f"request body incomplete after {seconds:g} s",
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


#: Key in the ASGI scope of a function that takes the place of a stream instead of a request's.
AS_STREAM = "vcasgd.as_stream"


class Places:
    """Places that requests of the same kind take while they are in progress."""

    def __init__(self, kind: str, total: int, each: int) -> None:
        self._kind, self._total, self._each = kind, total, each
        self._taken: Counter[str] = Counter()

    @contextmanager
    def taken(self, token: str) -> Iterator[None]:
        """Take a place. Raises :class:`ApiError` and :class:`Overloaded` if there is none."""
        if self._taken[token] >= self._each:
            raise ApiError(
                f"the token {token} has {self._each} {self._kind} in progress, which is its limit",
                remedy="wait until one of them has ended",
                status=HTTPStatus.TOO_MANY_REQUESTS,
            )
        if self._taken.total() >= self._total:
            raise Overloaded(f"the API has {self._total} {self._kind} in progress")
        self._taken[token] += 1
        try:
            yield
        finally:
            self._taken[token] -= 1
            if not self._taken[token]:
                del self._taken[token]


class Concurrency:
    """Middleware that limits the requests in progress with a token, and in total.

    Requests without one hold no place here: a connection with a token may take theirs.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._requests = Places("requests", MAX_REQUESTS, MAX_REQUESTS_PER_TOKEN)
        self._streams = Places("streams", MAX_STREAMS, MAX_STREAMS_PER_TOKEN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get(CALLER_KEY)
        if caller is None:
            await self._app(scope, receive, send)
            return
        with ExitStack() as place:
            try:
                place.enter_context(self._requests.taken(caller.name))
            except VcasgdError as error:
                await problem_response(error)(scope, receive, send)
                return
            scope[AS_STREAM] = self._as_stream(place, caller.name)
            await self._app(scope, receive, send)

    def _as_stream(self, place: ExitStack, token: str) -> Callable[[], None]:
        def as_stream() -> None:
            with ExitStack() as stream:
                stream.enter_context(self._streams.taken(token))
                place.close()
                place.push(stream.pop_all())

        return as_stream
