"""Real primary, replica and three Sentinels, which tests can kill or freeze."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from support.children import Process
from support.harness import RedisServer
from support.ports import free_port
from support.servers import require_binary
from support.waiting import PATIENCE, await_truth
from vcasgd.errors import StoreError
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.embedded import (
    SENTINELS,
    ServerFiles,
    Service,
    replication_lines,
    sentinel_command,
    write_sentinel_configuration,
)

#: Seconds until an unresponsive primary counts as down; a busy machine can delay it for less.
DOWN_SECONDS = 1.5
#: Seconds until the primary notices the loss of its replica.
LAG_SECONDS = 2


class Replicated:
    """A service monitored by Sentinels; call :meth:`end` to stop it.

    ``strict``: a primary without a replica refuses writes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        kind: str = "valkey",
        durable: bool = False,
        strict: bool = True,
        replica_timeout: float = 2.0,
        down_seconds: float = DOWN_SECONDS,
    ) -> None:
        self.directory = directory
        self._down_seconds = down_seconds
        self._binary = require_binary(kind)
        password = secrets.token_hex(8)
        self.nodes: list[RedisServer] = []
        self._password, self._strict = password, strict
        for index in range(2):
            lines = self._lines(self.nodes[0] if self.nodes else None)
            self.nodes.append(
                RedisServer(
                    directory / f"node-{index}", durable=durable, binary=self._binary, more=lines,
                    password=password,
                )
            )  # fmt: skip
        self.service = Service(directory.name, self.nodes[0].files.port, password)
        shared = secrets.token_hex(8)
        self.sentinel_files = [
            ServerFiles(directory / f"sentinel-{index}", free_port(), shared)
            for index in range(SENTINELS)
        ]
        self.sentinels = [self._start_sentinel(files) for files in self.sentinel_files]
        self.url = f"{self.service.url(self.sentinel_files)}&replica_timeout={replica_timeout}"
        await_truth(self._watched)
        #: The service as ``vcasgd`` processes configure it.
        self.connection = self.client()

    def client(self, *, waits: bool = True) -> RedisClient:
        return connect(self.url, waits=waits)

    def end(self) -> None:
        self.connection.close()
        for sentinel in self.sentinels:
            sentinel.end()
        for node in self.nodes:
            node.end()

    # -- roles --------------------------------------------------------------------------------

    @property
    def primary(self) -> RedisServer:
        """Wait until all running Sentinels name the same primary, and return it."""
        (port,) = await_truth(lambda: len(found := self._primaries()) == 1 and found)
        return next(node for node in self.nodes if node.files.port == port)

    def _primaries(self) -> set[int]:
        found = set()
        for files, process in zip(self.sentinel_files, self.sentinels, strict=True):
            if process.alive:
                with self._ask(files) as sentinel:
                    found.add(int(sentinel.sentinel_master(self.service.name)["port"]))
        return found

    @property
    def replica(self) -> RedisServer:
        primary = self.primary
        return next(node for node in self.nodes if node is not primary)

    def role(self, node: RedisServer) -> str:
        try:
            return str(node.connection.info("replication")["role"])
        except StoreError:
            return "away"

    def await_primary(self, node: RedisServer) -> None:
        """Wait until the Sentinels and the server itself report that it is the primary."""
        port = {node.files.port}
        await_truth(lambda: self._primaries() == port and self.role(node) == "master")

    def await_replica(self, node: RedisServer) -> None:
        """Wait until it follows the other server and has all its data."""

        def follows() -> bool:
            try:
                info = node.connection.info("replication")
            except StoreError:
                return False
            return info["role"] == "slave" and info.get("master_link_status") == "up"

        await_truth(follows)

    def kill_primary(self) -> tuple[RedisServer, RedisServer]:
        """Kill the primary; return it and the server that will be promoted."""
        old, new = self.primary, self.replica
        old.kill()
        return old, new

    def restart(self, node: RedisServer) -> None:
        """Restart a dead primary as a replica, after the other server was promoted.

        Before that, the Sentinels would still treat it as the primary, with no data.
        """
        other = next(each for each in self.nodes if each is not node)
        self.await_primary(other)
        node.configure([*self._lines(other)])
        node.start()
        self.await_replica(node)

    # -- internals ------------------------------------------------------------------------------

    def _lines(self, primary: RedisServer | None) -> list[str]:
        port = primary.files.port if primary else None
        lines = replication_lines(self._password, primary_port=port, lag_seconds=LAG_SECONDS)
        return lines if self._strict else [*lines, "min-replicas-to-write 0"]

    def _start_sentinel(self, files: ServerFiles) -> Process:
        write_sentinel_configuration(files, [self.service], down_seconds=self._down_seconds)
        command = sentinel_command(files, self._binary)
        return Process(command, self.directory / f"{files.directory.name}.log")

    def _watched(self) -> bool:
        """Return True if every Sentinel has found the replica and the others."""
        try:
            for files in self.sentinel_files:
                with self._ask(files) as sentinel:
                    state = sentinel.sentinel_master(self.service.name)
                if (state["num-slaves"], state["num-other-sentinels"]) != (1, SENTINELS - 1):
                    return False
        except redis.RedisError:
            return False
        self.await_replica(self.nodes[1])
        return True

    @contextmanager
    def _ask(self, files: ServerFiles) -> Iterator[redis.Redis]:
        client = redis.Redis(port=files.port, password=files.password, socket_timeout=PATIENCE)
        try:
            yield client
        finally:
            client.close()


@contextmanager
def replicated(directory: Path, kind: str = "valkey", **options: Any) -> Iterator[Replicated]:
    """Start a service with the folder's name."""
    directory.mkdir(parents=True, exist_ok=True)
    service = Replicated(directory, kind=kind, **options)
    try:
        yield service
    finally:
        service.end()
