"""Unix sockets on this machine that lead to the servers behind a gateway."""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from vcasgd.agent.connection import CONNECT_SECONDS, GatewayAddress
from vcasgd.errors import StackError, Unauthorized
from vcasgd.gateway.relay import ACCEPTED, Stream, close, first_line, relay
from vcasgd.limits import GATEWAY_BUFFER_BYTES

log = logging.getLogger(__name__)

#: Most bytes of a socket's path.
PATH_BYTES = 107


class Tunnel(threading.Thread):
    """Thread that passes on the connections of workers.

    There is one socket for each service in ``folder``, which only this user may enter.
    """

    def __init__(
        self, gateway: GatewayAddress, token: str, services: Sequence[str], folder: Path
    ) -> None:
        """Raise :class:`StackError` if the folder's path is too long."""
        super().__init__(name="tunnel", daemon=True)
        self._gateway = gateway
        self._token = token
        self._paths = {service: folder / service for service in services}
        for path in self._paths.values():
            if len(bytes(path)) > PATH_BYTES:
                raise StackError(
                    f"{path} is too long for a socket", remedy="set TMPDIR to a short path"
                )
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._ready = threading.Event()
        #: Bytes that were sent and received.
        self.sent = self.received = 0

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        try:
            self._loop.run_until_complete(self._serve())
        except Exception:
            log.exception("the sockets for workers")
        finally:
            self._loop.close()

    def await_ready(self) -> None:
        """Return when the sockets exist. Raises :class:`StackError` if they can't be made."""
        if not self._ready.wait(CONNECT_SECONDS):
            self.check()
            raise StackError(f"no sockets after {CONNECT_SECONDS:g} s", remedy="try again")

    def check(self) -> None:
        """Raise :class:`StackError` if the thread has ended by itself."""
        if not self.is_alive():
            raise StackError("the sockets for workers are gone; the error is above")

    def stop(self) -> None:
        """Close all connections, and end the thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self.join(CONNECT_SECONDS)

    async def _serve(self) -> None:
        servers = [
            await asyncio.start_unix_server(self._passer(service), path, limit=GATEWAY_BUFFER_BYTES)
            for service, path in self._paths.items()
        ]
        self._ready.set()
        await self._stopped.wait()
        for server in servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _passer(self, service: str) -> Callable[[StreamReader, StreamWriter], Awaitable[None]]:
        async def pass_on(reader: StreamReader, writer: StreamWriter) -> None:
            try:
                server = await self._open(service)
                await relay((reader, writer), server, self._count_sent, self._count_received)
            except (OSError, TimeoutError, Unauthorized) as error:
                # The worker retries.
                log.warning("%s: %s", service, error or type(error).__name__)
            except asyncio.CancelledError:
                # The tunnel stops. Older versions of asyncio would log it as an error.
                pass
            finally:
                close(writer)

        return pass_on

    async def _open(self, service: str) -> Stream:
        gateway = self._gateway
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(
                gateway.host,
                gateway.port,
                ssl=gateway.server_tls,
                server_hostname=gateway.host,
                limit=GATEWAY_BUFFER_BYTES,
            )
            writer.write(first_line(service, self._token))
            answer = await reader.readline()
        if answer != ACCEPTED:
            close(writer)
            raise Unauthorized(answer.decode(errors="replace").strip().lstrip("-") or "refused")
        return reader, writer

    def _count_sent(self, count: int) -> None:
        self.sent += count

    def _count_received(self, count: int) -> None:
        self.received += count
