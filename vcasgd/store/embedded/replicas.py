"""Configurations of replicas of our own servers, and of the Sentinels that monitor them.

The settings follow https://redis.io/docs/latest/operate/oss_and_stack/management/sentinel/ and
…/management/replication/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import redis

from vcasgd.local_files import write_private
from vcasgd.store.embedded.server import ServerFiles, server_binary

#: An odd number, so that after the loss of one the other two can agree.
SENTINELS = 3
QUORUM = 2


@dataclass(frozen=True)
class Service:
    """A primary and its replicas, which share a password; ``port`` of the first primary."""

    name: str
    port: int
    password: str

    def __repr__(self) -> str:
        return f"Service(name={self.name!r}, port={self.port})"

    def url(self, sentinels: Sequence[ServerFiles], replicas: int = 1) -> str:
        """Return the URL for :func:`vcasgd.store.connection.connect`."""
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in sentinels)
        options = f"replicas={replicas}&sentinel_password={quote(sentinels[0].password)}"
        return f"redis+sentinel://:{quote(self.password)}@{hosts}/{self.name}/0?{options}"


def replication_lines(
    password: str, *, primary_port: int | None = None, lag_seconds: int = 10
) -> list[str]:
    """Return the additional configuration lines of a server with replicas.

    ``primary_port``: of the primary that it follows at first; None for the first primary. A
    primary without contact to a replica for ``lag_seconds`` refuses writes: it may have been cut
    off, and Sentinel may have promoted another server.
    """
    follow = [] if primary_port is None else [f"replicaof 127.0.0.1 {primary_port}"]
    return [
        f"masterauth {password}",
        "min-replicas-to-write 1",
        f"min-replicas-max-lag {lag_seconds}",
        "repl-ping-replica-period 1",
        # Output that waits for an unreachable replica must not fill the memory.
        "client-output-buffer-limit replica 2gb 1gb 60",
        # Copies go from memory to memory, because the disk may have no room for one.
        "repl-diskless-sync yes",
        "repl-diskless-sync-delay 0",
        "repl-diskless-load swapdb",
        *follow,
    ]


def write_sentinel_configuration(
    files: ServerFiles, services: Sequence[Service], *, down_seconds: float = 2.0
) -> None:
    """Write a Sentinel's configuration, in which it also stores its state.

    ``down_seconds``: time without an answer after which a server counts as down.
    """
    files.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = [
        "bind 127.0.0.1",
        f"port {files.port}",
        f"dir {files.directory}",
        # The password of this Sentinel, and the one that it sends to the others.
        f"requirepass {files.password}",
        f"sentinel sentinel-pass {files.password}",
        "daemonize no",
    ]
    for service in services:
        lines += [
            f"sentinel monitor {service.name} 127.0.0.1 {service.port} {QUORUM}",
            f"sentinel auth-pass {service.name} {service.password}",
            f"sentinel down-after-milliseconds {service.name} {int(down_seconds * 1000)}",
            f"sentinel failover-timeout {service.name} {int(down_seconds * 6000)}",
            f"sentinel parallel-syncs {service.name} 1",
        ]
    write_private(files.configuration, "\n".join([*lines, ""]))


def watches(files: ServerFiles, services: Sequence[Service]) -> bool:
    """Return True if a Sentinel has found primary, replica and Sentinels of each service."""
    try:
        with redis.Redis(
            port=files.port, password=files.password, socket_timeout=1.0, socket_connect_timeout=1.0
        ) as sentinel:
            return all(_is_complete(sentinel.sentinel_master(each.name)) for each in services)
    except redis.RedisError:
        return False


def _is_complete(state: dict[str, Any]) -> bool:
    counts = int(state["num-slaves"]), int(state["num-other-sentinels"])
    return counts == (1, SENTINELS - 1)


def sentinel_command(files: ServerFiles, configured: str | None = None) -> list[str]:
    """Return the command line of a Sentinel. Raises as :func:`server_binary` does."""
    return [server_binary(configured), str(files.configuration), "--sentinel"]
