"""Server-sent events over connections that break."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar, cast

import httpx
from httpx_sse import EventSource, ServerSentEvent

from vcasgd.backoff import backoff, jittered
from vcasgd.client.problems import may_work_later
from vcasgd.errors import ApiError

#: Seconds for which a client tries to reconnect before it raises the error.
PATIENCE_SECONDS = 120.0
#: Seconds of silence after which a connection counts as broken; the API sends keep-alive comments
#: far more often.
SILENCE_SECONDS = 30.0
FIRST_PAUSE = 0.2
MAX_PAUSE = 5.0

Result = TypeVar("Result")


#: Opens the stream after an ID, with a read timeout in seconds.
OpenStream = Callable[[str | None, float], AbstractContextManager[httpx.Response]]


class _Patience:
    """Growing pauses between attempts, and a limit to them."""

    def __init__(
        self, seconds: float, is_temporary: Callable[[ApiError], bool] = may_work_later
    ) -> None:
        self._seconds = seconds
        self._is_temporary = is_temporary
        self.renew()

    def renew(self) -> None:
        """Start again after a success."""
        self._failing_since: float | None = None
        self._failures = 0

    def wait(self, error: ApiError) -> None:
        """Sleep. Raise ``error`` if it persists, or if the limit is reached."""
        if not self._is_temporary(error):
            raise error
        now = time.monotonic()
        # count from the first failure: the caller may have worked on an entry for long before it
        self._failing_since = self._failing_since or now
        self._failures += 1
        pause = jittered(backoff(self._failures, FIRST_PAUSE, MAX_PAUSE))
        if now + pause > self._failing_since + self._seconds:
            raise error
        time.sleep(pause)


def retried(
    request: Callable[[], Result],
    patience: float,
    is_temporary: Callable[[ApiError], bool] = may_work_later,
) -> Result:
    """Return the result of a request, retried for ``patience`` seconds if the API is away."""
    waiting = _Patience(patience, is_temporary)
    while True:
        try:
            return request()
        except ApiError as error:
            waiting.wait(error)


def messages(
    open_stream: OpenStream,
    after: str | None,
    patience: float,
    *,
    silence: float = SILENCE_SECONDS,
) -> Iterator[ServerSentEvent]:
    """Yield all messages after an ID, each once, until the stream ends.

    The iterator reconnects with the last ID, and raises :class:`ApiError` after ``patience``
    seconds without a connection. ``silence``: seconds without data after which a connection
    counts as broken.
    """
    waiting = _Patience(patience)
    while True:
        broken = ApiError("the stream ended before the job did")
        try:
            with open_stream(after, silence) as response:
                response.stream = _Body(response, waiting.renew)
                for message in EventSource(response).iter_sse():
                    if message.event == "end":
                        return
                    after = message.id or after
                    # comments after an ID appear as messages without data
                    if message.data:
                        yield message
        except ApiError as error:
            broken = error
        waiting.wait(broken)


class _Body(httpx.SyncByteStream):
    """Body of a response that reports each chunk, because an event source hides comments."""

    def __init__(self, response: httpx.Response, received: Callable[[], None]) -> None:
        self._stream = cast("httpx.SyncByteStream", response.stream)
        self._received = received

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            self._received()
            yield chunk

    def close(self) -> None:
        self._stream.close()
