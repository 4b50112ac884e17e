"""How to start replicas of a server of our own, and the Sentinels that watch over them.

The settings follow https://redis.io/docs/latest/operate/oss_and_stack/management/sentinel/ and
…/management/replication/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import redis

from vcasgd.store.embedded.server import ServerFiles, server_binary, write_private

#: an odd number, so that one of them may die and two agree
SENTINELS = 3
QUORUM = 2


@dataclass(frozen=True)
class Service:
    """One primary and its replicas, which share a password. ``port``: of the first primary."""

    name: str
    port: int
    password: str

    def __repr__(self) -> str:
        return f"Service(name={self.name!r}, port={self.port})"

    def url(self, sentinels: Sequence[ServerFiles], replicas: int = 1) -> str:
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in sentinels)
        options = f"replicas={replicas}&sentinel_password={quote(sentinels[0].password)}"
        return f"redis+sentinel://:{quote(self.password)}@{hosts}/{self.name}/0?{options}"


def replication_lines(
    password: str, *, primary_port: int | None = None, lag_seconds: int = 10
) -> list[str]:
    """What the configuration of a server with replicas has beside the usual.

    ``primary_port``: of the primary that it follows at first, None where it is the first one.
    A primary that has heard of no replica for ``lag_seconds`` takes no write: it may have been
    cut off, and Sentinel may have made another one.
    """
    follow = [] if primary_port is None else [f"replicaof 127.0.0.1 {primary_port}"]
    return [
        f"masterauth {password}",
        "min-replicas-to-write 1",
        f"min-replicas-max-lag {lag_seconds}",
        "repl-ping-replica-period 1",
        # a replica that can't be asked for long must not hold the whole backlog in memory
        "client-output-buffer-limit replica 2gb 1gb 60",
        # the copy goes from memory to memory; there may be no room for it on the disk
        "repl-diskless-sync yes",
        "repl-diskless-sync-delay 0",
        "repl-diskless-load swapdb",
        *follow,
    ]


def write_sentinel_configuration(
    files: ServerFiles, services: Sequence[Service], *, down_seconds: float = 2.0
) -> None:
    """Writes a Sentinel's configuration, which it keeps its own state in.

    ``down_seconds``: silence after which a server is taken for dead.
    """
    files.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = [
        "bind 127.0.0.1",
        f"port {files.port}",
        f"dir {files.directory}",
        # of this one, and what it shows to the others
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
    write_private(files.configuration, lines)


def watches(files: ServerFiles, services: Sequence[Service]) -> bool:
    """Whether a Sentinel knows a primary, a replica and the other Sentinels of each service."""
    try:
        with redis.Redis(
            port=files.port, password=files.password, socket_timeout=1.0, socket_connect_timeout=1.0
        ) as sentinel:
            return all(_is_whole(sentinel.sentinel_master(each.name)) for each in services)
    except redis.RedisError:
        return False


def _is_whole(state: dict[str, Any]) -> bool:
    known = int(state["num-slaves"]), int(state["num-other-sentinels"])
    return known == (1, SENTINELS - 1)


def sentinel_command(files: ServerFiles, configured: str | None = None) -> list[str]:
    return [server_binary(configured), str(files.configuration), "--sentinel"]
