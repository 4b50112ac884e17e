"""As what a replicated server of the stack is started again.

A dead server is not started before the Sentinels have made the other one the primary: until
then they would take it for the primary still, and the other one would throw away what it has,
to be like it (redis.io warns of just this: "Safety of replication when master has persistence
turned off").
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

from vcasgd.errors import StackError
from vcasgd.store.embedded.replicas import replication_lines
from vcasgd.store.embedded.server import ServerFiles, write_configuration
from vcasgd.store.sentinel import named_primary

#: if nobody took its place by then there is nobody who could: it has to begin alone. Sentinels
#: whose machine stood still for two seconds promote nobody for the next thirty (TILT)
PROMOTION_SECONDS = 45.0
_MONITOR = re.compile(r'^sentinel monitor "?(\S+?)"? \S+ (\d+) \d+$', re.MULTILINE)
_EPOCH = re.compile(r'^sentinel config-epoch "?(\S+?)"? (\d+)$', re.MULTILINE)


class Member:
    """One server of a service; ``url``: of the service."""

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
        self._waits_since: float | None = None

    def configure(self, primary_port: int) -> None:
        """For its next start."""
        follow = None if primary_port == self._files.port else primary_port
        lines = replication_lines(self._files.password, primary_port=follow)
        write_configuration(
            self._files, durable=self._durable, memory_mb=self._memory_mb, more=lines
        )

    def may_come_back(self) -> bool:
        """Whether it may be started again now; it is configured then."""
        if self._waits_since is None:
            self._waits_since = self._clock()
        primary = named_primary(self._url)
        port = primary[1] if primary else self._files.port
        late = self._clock() - self._waits_since > PROMOTION_SECONDS
        if port == self._files.port and not late:
            return False
        self.configure(port)
        self._waits_since = None
        return True


def last_primary(sentinels: Iterable[ServerFiles], service: str) -> int | None:
    """The port of a service's primary as the Sentinels wrote it down last; None if they never
    did."""
    found: list[tuple[int, int]] = []
    for files in sentinels:
        try:
            text = files.configuration.read_text()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StackError(f"can't read {files.configuration}: {error.strerror}") from error
        epochs = dict(_EPOCH.findall(text))
        found += [
            (int(epochs.get(name, 0)), int(port))
            for name, port in _MONITOR.findall(text)
            if name == service
        ]
    return max(found)[1] if found else None
