"""Limits on the requests and streams that each token has in progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from vcasgd.api.callers import CALLER_KEY
from vcasgd.api.problems import problem_response
from vcasgd.errors import ApiError, Overloaded, VcasgdError
from vcasgd.limits import (
    MAX_REQUESTS,
    MAX_REQUESTS_PER_TOKEN,
    MAX_STREAMS,
    MAX_STREAMS_PER_TOKEN,
)

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
