"""A real gateway before a real API and a real ledger, and clients of its port."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vcasgd
from support.api_harness import Api
from support.children import ForkedProcess
from support.harness import RedisServer
from support.ports import free_port, listens
from support.waiting import PATIENCE, await_truth
from vcasgd.agent.connection import AgentConnection, GatewayAddress, JoinToken
from vcasgd.client.transport import Transport
from vcasgd.gateway.relay import ensure_certificate, first_line, pin_of
from vcasgd.limits import GATEWAY_HANDSHAKE_TIMEOUT
from vcasgd.schemas.joining import MACHINE_SECRET, JoinRequest

MACHINE = JoinRequest(version=vcasgd.__version__, host="laptop", cpus=2.0, memory_mb=8000)


@dataclass
class RunningGateway:
    api: Api
    port: int
    pin: str
    #: Settings of the API behind it.
    api_env: dict[str, str]
    process: ForkedProcess
    certificate: Path
    key: Path
    #: Connections of the present test.
    opened: list[Transport | AgentConnection] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def address(self) -> GatewayAddress:
        return GatewayAddress.of(self.url, self.pin)

    def publish_pool(self, **fields: Any) -> None:
        """Publish the pool of volunteers as the controller does."""
        row = {"position": 0, "provider": "join", "spot": True, "labels": [], "capacity": None}
        self.api.control.publish({}, {"volunteers": {**row, **fields}})

    def token(self, name: str, scope: str = "join", **options: Any) -> str:
        """Return a new token, by default for joining the pool of volunteers."""
        pool = "volunteers" if scope == "join" else None
        with self.api.client() as client:
            return client.create_token(name, scope, **{"pool": pool, **options}).token

    def transport(self, token: str, secret: str = "") -> Transport:
        """Return a client with a token, and the secret of a machine."""
        transport = Transport(
            self.url,
            JoinToken.parse(token).text,
            PATIENCE,
            tls=self.address().api_tls,
            headers={MACHINE_SECRET: secret or secrets.token_hex()},
        )
        self.opened.append(transport)
        return transport

    def machine(self, token: str, secret: str = "") -> AgentConnection:
        """Return the connection of a machine that can join, with a secret of its own by default."""
        secret = secret or secrets.token_hex()
        connection = AgentConnection(self.address(), JoinToken.parse(token), secret)
        self.opened.append(connection)
        return connection

    def served(self) -> str:
        """Return the pin of the certificate that a new connection gets."""
        return await_truth(self._served)

    def _served(self) -> str | None:
        began = time.monotonic()
        try:
            return pin_of(ssl.get_server_certificate(("127.0.0.1", self.port)))
        except OSError:
            # On a busy machine, a handshake may take longer than the gateway waits.
            if time.monotonic() - began < GATEWAY_HANDSHAKE_TIMEOUT:
                raise
            return None

    def close_all(self) -> None:
        while self.opened:
            self.opened.pop().close()

    @contextlib.contextmanager
    def connection(self, service: str, token: str) -> Iterator[tuple[ssl.SSLSocket, bytes]]:
        """Connect to a server behind the gateway; yield the connection and the first answer."""
        with (
            socket.create_connection(("127.0.0.1", self.port), PATIENCE) as plain,
            self.address().server_tls.wrap_socket(plain) as tls,
        ):
            tls.sendall(first_line(service, JoinToken.parse(token).text))
            yield tls, tls.recv(4096)


@contextlib.contextmanager
def running_gateway(home: Path, **more: str) -> Iterator[RunningGateway]:
    """Run a ledger, an API with a socket for a gateway, and the gateway, with ``more`` settings."""
    certificate, key = home / "gateway" / "certificate.pem", home / "gateway" / "key.pem"
    pin, port = ensure_certificate(certificate, key), free_port()
    with contextlib.ExitStack() as stack:
        ledger = RedisServer(home / "ledger", durable=True)
        stack.callback(ledger.end)
        behind = {
            "VCASGD_API_SOCKET": str(home / "api.sock"),
            "VCASGD_JOIN_PIN": pin,
            "VCASGD_JOIN_URL": f"https://127.0.0.1:{port}",
            # it stands for the tensors server, too
            "VCASGD_TENSORS_URL": ledger.files.url,
            **more,
        }
        api = Api(home, ledger).start(**behind)
        stack.callback(lambda: api.end())
        env = {
            **api.env,
            **behind,
            "VCASGD_JOIN_PORT": str(port),
            "VCASGD_JOIN_HOST": "127.0.0.1",
            "VCASGD_JOIN_CERTIFICATE": str(certificate),
            "VCASGD_JOIN_KEY": str(key),
        }
        gateway = ForkedProcess("vcasgd.gateway.main:main", [], home / "gateway.log", env)
        stack.callback(gateway.end)
        await_truth(lambda: listens(port))
        yield RunningGateway(api, port, pin, behind, gateway, certificate, key)
