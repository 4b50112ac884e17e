"""Restart of a replicated server as a primary or a replica.

A dead primary does not start before the Sentinels have promoted its replica; see
:mod:`vcasgd.store.embedded.role_at_start`. The supervisor asks without waiting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

from vcasgd.errors import StackError
from vcasgd.store.embedded.role_at_start import PROMOTION_SECONDS
from vcasgd.store.embedded.server import ServerFiles, replication_lines, write_configuration
from vcasgd.store.sentinel import named_primary

_MONITOR = re.compile(r'^sentinel monitor "?(\S+?)"? \S+ (\d+) \d+$', re.MULTILINE)
_EPOCH = re.compile(r'^sentinel config-epoch "?(\S+?)"? (\d+)$', re.MULTILINE)


class ReplicatedServer:
    """One server of a replicated service; ``url`` is the URL of the service."""

    def __init__(
        self,
        files: ServerFiles,
        url: str,
        *,
        durable: bool,
        memory_mb: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._url = url
        self._durable = durable
        self._memory_mb = memory_mb
        self._clock = clock
        self._started = False
        self._waiting_since: float | None = None

    def configure(self, primary_port: int) -> None:
        """Write the configuration of the next start."""
        follow = None if primary_port == self._files.port else primary_port
        lines = replication_lines(self._files.password, primary_port=follow)
        write_configuration(
            self._files, durable=self._durable, memory_mb=self._memory_mb, more=lines
        )

    def may_start(self) -> bool:
        """Return True if the server may start now, and configure it for a restart.

        The first start uses the configuration of :meth:`configure`.
        """
        if not self._started:
            self._started = True
            return True
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        primary = named_primary(self._url)
        port = primary[1] if primary else self._files.port
        late = self._clock() - self._waiting_since > PROMOTION_SECONDS
        if port == self._files.port and not late:
            return False
        self.configure(port)
        self._waiting_since = None
        return True


def last_primary(sentinels: Iterable[ServerFiles], service: str) -> int | None:
    """Return the port of a service's primary in the Sentinels' files, or None if it is in none."""
    primaries: list[tuple[int, int]] = []
    for files in sentinels:
        try:
            text = files.configuration.read_text()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StackError(f"can't read {files.configuration}: {error.strerror}") from error
        epochs = dict(_EPOCH.findall(text))
        primaries += [
            (int(epochs.get(name, 0)), int(port))
            for name, port in _MONITOR.findall(text)
            if name == service
        ]
    return max(primaries)[1] if primaries else None
