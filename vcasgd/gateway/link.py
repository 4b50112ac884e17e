"""Measurements of links: the gateway sends and receives bytes for a machine, within limits.

After the first line, a machine sends requests: ``down N`` is answered with N bytes, and ``up N``,
which N bytes follow, with ``+``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict, deque

from vcasgd.errors import Unauthorized
from vcasgd.gateway.protocol import ACCEPTED, MAX_LINK_BYTES, parse_link_request
from vcasgd.gateway.relay import Stream

#: Seconds of one measurement, and its bytes in both directions together.
MAX_SECONDS = 15.0
MAX_BYTES = 4 * MAX_LINK_BYTES
#: Measurements that run at a time: others would be part of what they measure.
MAX_RUNNING = 4
#: Measurements of one token within the seconds. A machine needs two each time that it joins.
MAX_PER_TOKEN, WINDOW_SECONDS = 20, 60.0
_PIECE = os.urandom(1 << 16)


class LinkMeasurements:
    """Serves measurements of all machines."""

    def __init__(self) -> None:
        self._running = 0
        self._starts: defaultdict[str, deque[float]] = defaultdict(deque)

    def admit(self, digest: str) -> None:
        """Count a measurement of a token. Raises :class:`Unauthorized` if there are too many."""
        oldest = time.monotonic() - WINDOW_SECONDS
        for token in [each for each, starts in self._starts.items() if starts[-1] < oldest]:
            del self._starts[token]
        starts = self._starts[digest]
        while starts and starts[0] < oldest:
            starts.popleft()
        if self._running >= MAX_RUNNING or len(starts) >= MAX_PER_TOKEN:
            raise Unauthorized("there are too many measurements of links at the moment")
        starts.append(time.monotonic())

    async def serve(self, guest: Stream) -> None:
        """Answer requests. Raises :class:`TimeoutError` and :class:`OSError`."""
        self._running += 1
        try:
            async with asyncio.timeout(MAX_SECONDS):
                await _answer(guest)
        finally:
            self._running -= 1


async def _answer(guest: Stream) -> None:
    reader, writer = guest
    left = MAX_BYTES
    while (request := parse_link_request(await _line(reader))) is not None:
        direction, size = request
        left -= size
        if left < 0:
            return
        if direction == "down":
            for at in range(0, size, len(_PIECE)):
                writer.write(_PIECE[: size - at])
                await writer.drain()
            continue
        while size:
            data = await reader.read(min(size, len(_PIECE)))
            if not data:
                return
            size -= len(data)
        writer.write(ACCEPTED)
        await writer.drain()


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:
        # It is longer than the buffer.
        return b""
