"""Server-sent events over connections that break."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import httpx

from vcasgd.backoff import backoff, jittered
from vcasgd.client.problems import may_work_later
from vcasgd.errors import ApiError

#: how long a follower tries to come back before it gives up
PATIENCE_SECONDS = 120.0
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0

#: opens the stream after an id
Open = Callable[[str | None], AbstractContextManager[httpx.Response]]


@dataclass
class Message:
    """One server-sent event."""

    id: str | None = None
    event: str = "message"
    data: str = ""


class _Patience:
    """Pauses that grow until something works again, and an end to them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        self._failing_since: float | None = None
        self._failures = 0

    def wait(self, error: ApiError) -> None:
        """Raises the error where waiting would go beyond the limit."""
        now = time.monotonic()
        # from the first failure on: a caller may take long over what it was given before
        self._failing_since = self._failing_since or now
        self._failures += 1
        pause = jittered(backoff(self._failures, FIRST_PAUSE, LONGEST_PAUSE))
        if now + pause > self._failing_since + self._seconds:
            raise error
        time.sleep(pause)


def follow(open_stream: Open, after: str | None, patience: float) -> Iterator[dict[str, Any]]:
    """The data of all events after an id, each once, until the stream says that it is over.

    Raises as :func:`messages` does.
    """
    for message in messages(open_stream, after, patience):
        yield json.loads(message.data)


def messages(open_stream: Open, after: str | None, patience: float) -> Iterator[Message]:
    """All events after an id, until the stream says that it is over.

    Raises :class:`ApiError` after ``patience`` seconds without a sign of life, and at once
    where waiting doesn't help.
    """
    waiting = _Patience(patience)
    while True:
        broken = ApiError("the stream ended before the job did")
        try:
            with open_stream(after) as response:
                for message in parse(_lines(response, waiting)):
                    if message.event == "end":
                        return
                    after = message.id or after
                    yield message
        except ApiError as error:
            if not may_work_later(error):
                raise
            broken = error
        waiting.wait(broken)


def _lines(response: httpx.Response, waiting: _Patience) -> Iterator[str]:
    for line in response.iter_lines():
        # keep-alive comments are signs of life too
        waiting.renew()
        yield line


def parse(lines: Iterator[str]) -> Iterator[Message]:
    """Whole messages; one that was cut off is dropped, as the standard asks."""
    message, filled = Message(), False
    for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "" if not line:
                if filled:
                    yield message
                message, filled = Message(), False
            case "id":
                message.id = value
            case "event":
                message.event = value
            case "data":
                message.data += f"\n{value}" if filled else value
                filled = True
