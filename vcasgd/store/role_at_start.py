"""Primary or replica: the role that a server with a replica has when it starts.

A dead primary must not start before the Sentinels have promoted its replica. They would still
regard it as the primary, and the replica would discard its data to copy the empty primary (see
"Safety of replication when master has persistence turned off" on redis.io).

``python -m vcasgd.store.role_at_start OWN FIRST`` prints ``host:port`` of the primary of
this machine's tensors service when its server may start.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable

from vcasgd.errors import StackError, VcasgdError
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import load_settings
from vcasgd.store.embedded import ServerFiles, replication_lines, write_configuration
from vcasgd.store.sentinel import named_primary

Address = tuple[str, int]

#: Seconds to wait for a promotion. After that, no replica can be promoted, and the server starts
#: as the primary. Sentinels promote nothing for 30 s after a pause of 2 s (TILT mode).
PROMOTION_SECONDS = 45.0
#: Pause between two questions to the Sentinels.
PAUSE_SECONDS = 0.5


def primary_at_start(
    url: str, own: Address, first: Address, *, seconds: float = PROMOTION_SECONDS
) -> Address:
    """Return the primary's address, which is ``own`` if this server has to be the primary.

    Waits at most ``seconds`` while the Sentinels of the service ``url`` name this server, which is
    not running, or while no majority of them answers; then the primary is ``first``. Raises
    :class:`~vcasgd.errors.StoreError` as :func:`named_primary` does.
    """
    deadline = time.monotonic() + seconds
    while True:
        primary = named_primary(url)
        if primary not in (None, own):
            return primary
        if time.monotonic() >= deadline:
            return primary or first
        time.sleep(PAUSE_SECONDS)


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> int:
    """Print the primary's address. Return 1 after an error."""
    configure_logging("tensors")
    parser = argparse.ArgumentParser(prog="python -m vcasgd.store.role_at_start")
    parser.add_argument("own", type=_address, metavar="OWN", help="host:port of this server")
    parser.add_argument(
        "first", type=_address, metavar="FIRST", help="host:port of the service's first primary"
    )
    parser.add_argument("--seconds", type=float, default=PROMOTION_SECONDS)
    given = parser.parse_args()
    try:
        url = load_settings().own_tensors_url()
        host, port = primary_at_start(url, given.own, given.first, seconds=given.seconds)
    except VcasgdError as error:
        return exit_status(error)
    sys.stdout.write(f"{host}:{port}\n")
    return 0


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
    ) -> None:
        self._files = files
        self._url = url
        self._durable = durable
        self._memory_mb = memory_mb
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
            self._waiting_since = time.monotonic()
        primary = named_primary(self._url)
        port = primary[1] if primary else self._files.port
        late = time.monotonic() - self._waiting_since > PROMOTION_SECONDS
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


if __name__ == "__main__":
    sys.exit(main())
