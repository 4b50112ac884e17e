"""Two real servers that tests can kill, with proxies that fail at a chosen command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.harness import RedisServer
from support.servers import Fault, Moment, running_server, through_proxy
from vcasgd.store.connection import RedisClient


class FaultyServers:
    """Two servers, with faulty connections for parameter servers and some pushes."""

    def __init__(self, ledger: RedisServer, tensors: RedisServer, fault: Fault) -> None:
        self.ledger_server, self.tensors_server = ledger, tensors
        self.ledger, self.tensors = ledger.client(), tensors.client()
        self._fault = fault
        self.proxied_ledger: RedisClient
        self.proxied_tensors: RedisClient

    def restart(self, server: RedisServer) -> None:
        """Kill and restart a server, and drop all connections."""
        server.kill()
        server.start()
        for client in (self.ledger, self.tensors):
            client.connection_pool.disconnect(inuse_connections=False)

    @contextmanager
    def failing(
        self, at: int, moment: Moment, instead: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Fail once, at the ``at``-th command, by a cut or by calling ``instead``.

        Errors of ``instead``, which runs in the proxy's thread, are raised here.
        """
        fault, wrong = self._fault, []

        def guarded() -> None:
            try:
                if instead is not None:
                    instead()
            except BaseException as error:  # noqa: BLE001 - raised below
                wrong.append(error)

        fault.at, fault.moment = at, moment
        fault.instead = guarded if instead is not None else None
        fault.arm()
        try:
            yield
        finally:
            fault.disarm()
        if wrong:
            raise wrong[0]


@contextmanager
def faulty_servers(kind: str, folder: Path) -> Iterator[FaultyServers]:
    """Run servers of one kind for all histories."""
    fault = Fault(0)
    with (
        running_server(kind, folder / "ledger", durable=True) as ledger,
        running_server(kind, folder / "tensors") as tensors,
        through_proxy(ledger, 0, fault) as proxied_ledger,
        through_proxy(tensors, 0, fault) as proxied_tensors,
    ):
        servers = FaultyServers(ledger, tensors, fault)
        servers.proxied_ledger, servers.proxied_tensors = proxied_ledger, proxied_tensors
        yield servers
        servers.ledger.close()
        servers.tensors.close()
