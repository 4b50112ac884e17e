"""The gateway's process: ``python -m vcasgd.gateway.main``."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import contextlib
import ipaddress
import logging
import signal
import socket
import ssl
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

from vcasgd import limits
from vcasgd.container_limits import raise_file_limit
from vcasgd.errors import PortInUse, SpecError, StoreError, Unauthorized, VcasgdError
from vcasgd.gateway.relay import ACCEPTED, PROTOCOL, Stream, close, relay
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.spec.access import Scope
from vcasgd.steady_time import boot_time
from vcasgd.store.admission import LEDGER, tensors_service
from vcasgd.store.connection import connect
from vcasgd.store.ledger.api_tokens import FRESH_SECONDS, ApiToken, ApiTokens, KnownTokens, name_in
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.sentinel import address_of

log = logging.getLogger(__name__)


# -- open connections of one kind ------------------------------------------------------------------


class Crowd:
    """Connections of one kind, each served by a task, by a key of those who opened them.

    At a limit, a new connection takes the place of the one that has been silent for longest: of the
    same key, or else of the key with the most connections. So somebody who holds many, from few
    addresses or from many, closes their own and doesn't keep others out.
    """

    def __init__(self, limit: int, limit_of_key: int) -> None:
        self._limit = limit
        self._limit_of_key = limit_of_key
        #: Keys, and the tasks of each, from the longest silent one to the latest one.
        self._tasks: OrderedDict[str, OrderedDict[asyncio.Task[None], None]] = OrderedDict()
        self._open = 0
        #: Connections that made room for others.
        self.dropped = 0

    @contextmanager
    def member(self, key: str) -> Iterator[Callable[[int], None]]:
        """Count the present task's connection; cancel another one's task at a limit.

        Yield a function to call with the number of bytes whenever some were sent or received.
        """
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None
        tasks = self._tasks.setdefault(key, OrderedDict())
        tasks[task] = None
        self._tasks.move_to_end(key)
        self._open += 1
        if len(tasks) > self._limit_of_key:
            self._drop(key)
            self.dropped += 1
        elif self._open > self._limit:
            self._drop(max(self._tasks, key=lambda each: len(self._tasks[each])))
            self.dropped += 1

        def heard(_count: int) -> None:
            if task in tasks:
                tasks.move_to_end(task)
                self._tasks.move_to_end(key)

        try:
            yield heard
        finally:
            if task in tasks:
                self._forget(key, task)

    def keep(self, keys: Set[str]) -> int:
        """Close the connections of all other keys. Return their number."""
        others = [key for key, tasks in self._tasks.items() if key not in keys for _ in tasks]
        for key in others:
            self._drop(key)
        return len(others)

    def _drop(self, key: str) -> None:
        task = next(iter(self._tasks[key]))
        self._forget(key, task)
        task.cancel()

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        del self._tasks[key][task]
        self._open -= 1
        if not self._tasks[key]:
            del self._tasks[key]


def address_key(address: str) -> str:
    """Return the part of an IP address that one visitor can't choose: of IPv6, its /64."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if parsed.version == 4:
        return str(parsed)
    return str(parsed.ipv4_mapped or ipaddress.ip_network((parsed, 64), strict=False))


class Guests:
    """Checks tokens, and ends the connections of those that were revoked or have expired.

    ``crowd`` has the connections of guests by the digests of their tokens.
    """

    def __init__(self, tokens: KnownTokens, crowd: Crowd) -> None:
        self._tokens = tokens
        self.crowd = crowd

    async def watch(self) -> None:
        """Read the tokens until the task is cancelled."""
        while True:
            tokens, now = await self._tokens.all(boot_time()), time.time()
            valid = {each.digest for each in tokens.values() if not each.expired(now)}
            if ended := self.crowd.keep(valid):
                log.info("%d connections have ended with their tokens", ended)
            await asyncio.sleep(FRESH_SECONDS)

    async def check(self, text: str) -> ApiToken:
        """Return the token with this text. Raises :class:`Unauthorized` or :class:`StoreError`."""
        token, name = None, name_in(text)
        if name is not None:
            # Machines reach the tensors servers during an outage of the ledger, too.
            token = await self._tokens.find(name, lambda one: one.opened_by(text), outdated=True)
        if token is None:
            raise Unauthorized("the token is wrong or was revoked")
        if token.scope is not Scope.JOIN:
            raise Unauthorized(f"the token has scope {token.scope}, not {Scope.JOIN}")
        if token.expired(time.time()):
            raise Unauthorized("the token has expired")
        return token


# -- the process -----------------------------------------------------------------------------------

BACKLOG = 256
#: Seconds between two lines about connections that were closed to make room.
REPORT_SECONDS = 60.0
#: Seconds of silence after which the kernel asks whether the other side is still there. It closes
#: the connection if there is no answer for twice as long.
PROBE_SECONDS = 60
#: Open files besides connections, and parts of the others for each kind of connection.
_OTHER_FILES, _VISITORS_PART, _REQUESTS_PART, _GUESTS_PART = 64, 8, 8, 4
#: A request whose answer shows that the API serves others, too.
_ASK_API = b"GET /readyz HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n"


class Gateway:
    """Passes connections on. ``services`` are the URLs of the servers by name.

    ``files``: how many this process can open. A connection that is passed on takes two.
    """

    def __init__(
        self,
        tokens: KnownTokens,
        tls: ssl.SSLContext,
        services: Mapping[str, str],
        api_socket: Path,
        files: int,
    ) -> None:
        free = files - _OTHER_FILES
        guests = Crowd(
            min(limits.MAX_GATEWAY_GUESTS, free // _GUESTS_PART),
            limits.MAX_GATEWAY_GUESTS_OF_TOKEN,
        )
        self._visitors = Crowd(
            min(limits.MAX_GATEWAY_VISITORS, free // _VISITORS_PART),
            limits.MAX_GATEWAY_VISITORS_OF_ADDRESS,
        )
        self._requests = Crowd(
            min(limits.MAX_GATEWAY_REQUESTS, free // _REQUESTS_PART),
            limits.MAX_GATEWAY_REQUESTS_OF_ADDRESS,
        )
        self._guests = Guests(tokens, guests)
        self._crowds = {"visitors": self._visitors, "requests": self._requests, "machines": guests}
        self._tls = tls
        self._services = services
        self._api_socket = api_socket

    async def watch(self, joined: JoinedMachines, heartbeat: float) -> None:
        """Follow the tokens, report closed connections, and record that machines can report, until
        the task is cancelled."""
        signs = self._give_signs(joined, heartbeat)
        await asyncio.gather(self._guests.watch(), self._report(), signs)

    async def _report(self) -> None:
        before: dict[str, int] = {}
        while True:
            closed = {kind: crowd.dropped for kind, crowd in self._crowds.items()}
            if closed != before and any(closed.values()):
                log.warning("silent connections that were closed to make room: %s", closed)
            before = closed
            await asyncio.sleep(REPORT_SECONDS)

    async def _give_signs(self, joined: JoinedMachines, heartbeat: float) -> None:
        """Record that machines can report, while the API answers.

        Otherwise, the silence of the API or of this process would be that of all machines.
        """
        while True:
            with contextlib.suppress(OSError, EOFError, TimeoutError, StoreError):
                async with asyncio.timeout(limits.GATEWAY_FIRST_TIMEOUT):
                    api = await asyncio.open_unix_connection(str(self._api_socket))
                    try:
                        api[1].write(_ASK_API)
                        status = await api[0].readline()
                    finally:
                        close(api[1])
                if status.startswith(b"HTTP/1.1 200 "):
                    await asyncio.to_thread(joined.reports_arrive)
            await asyncio.sleep(heartbeat)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one connection."""
        peer = writer.get_extra_info("peername")
        try:
            if peer is not None:
                await self._serve((reader, writer), address_key(peer[0]))
        except asyncio.CancelledError:
            # It made room, or its token has ended. Older versions of asyncio would log an error.
            pass
        finally:
            writer.transport.abort()

    async def _serve(self, client: Stream, address: str) -> None:
        writer = client[1]
        try:
            with self._visitors.member(address):
                # Nothing may be awaited before: what has arrived must be left to TLS.
                await writer.start_tls(
                    self._tls, ssl_handshake_timeout=limits.GATEWAY_HANDSHAKE_TIMEOUT
                )
                writer.transport.set_write_buffer_limits(limits.GATEWAY_BUFFER_BYTES)
                tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
                is_guest = tls.selected_alpn_protocol() == PROTOCOL
                async with asyncio.timeout(limits.GATEWAY_FIRST_TIMEOUT):
                    begun = await (
                        self._admit(client) if is_guest else _until(client[0], b"\r\n\r\n")
                    )
            if isinstance(begun, bytes):
                await self._serve_request(client, address, begun)
            else:
                await self._serve_guest(client, *begun)
        except (OSError, EOFError, TimeoutError, VcasgdError) as error:
            log.debug("%s: %s", address, error)
        with self._visitors.member(address), contextlib.suppress(OSError, TimeoutError):
            close(writer)
            async with asyncio.timeout(limits.GATEWAY_CLOSE_TIMEOUT):
                await writer.wait_closed()

    async def _admit(self, guest: Stream) -> tuple[str, Stream]:
        """Return the digest of a guest's token, and the server."""
        try:
            line = (await _until(guest[0], b"\n")).decode(errors="replace").strip()
            service, _, text = line.partition(" ")
            if service not in self._services:
                raise Unauthorized("there is no such service")
            token = await self._guests.check(text)
            return token.digest, await self._connect(self._services[service])
        except Unauthorized as error:
            guest[1].write(f"-{error.message}\n".encode())
            raise
        except (OSError, StoreError):
            # Without its address, which guests don't need.
            guest[1].write(b"-the server behind the gateway does not answer\n")
            raise

    async def _serve_guest(self, guest: Stream, digest: str, server: Stream) -> None:
        try:
            with self._guests.crowd.member(digest) as heard:
                guest[1].write(ACCEPTED)
                await relay(guest, server, heard, heard)
        finally:
            close(server[1])

    async def _serve_request(self, client: Stream, address: str, head: bytes) -> None:
        """Pass a connection on to the API, from the head of its first request on."""
        loop = asyncio.get_running_loop()
        with self._requests.member(address) as heard:
            async with asyncio.timeout(limits.GATEWAY_IDLE_TIMEOUT) as idle:

                def passed(count: int) -> None:
                    heard(count)
                    idle.reschedule(loop.time() + limits.GATEWAY_IDLE_TIMEOUT)

                api = await asyncio.open_unix_connection(
                    str(self._api_socket), limit=limits.GATEWAY_BUFFER_BYTES
                )
                api[1].write(head)
                await relay(client, api, passed, passed)

    async def _connect(self, url: str) -> Stream:
        address = await asyncio.to_thread(address_of, url)
        limit = limits.GATEWAY_BUFFER_BYTES
        if address.path:
            return await asyncio.open_unix_connection(address.path, limit=limit)
        return await asyncio.open_connection(
            address.host, address.port, ssl=address.tls, limit=limit
        )


async def _until(reader: asyncio.StreamReader, end: bytes) -> bytes:
    """Return the first line of a guest, or the head of a request. Raises :class:`Unauthorized`."""
    try:
        return await reader.readuntil(end)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise Unauthorized("the first line is incomplete or too long") from error


def tls_of(settings: Settings) -> ssl.SSLContext:
    """Return the TLS configuration of the port. Raises :class:`SpecError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([PROTOCOL, "http/1.1"])
    load_certificate(context, settings)
    return context


def load_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    """Read the certificate and its key, for connections from now on. Raises :class:`SpecError`."""
    certificate = settings.required("join_certificate")
    try:
        # A pair that doesn't match would leave a context that serves nobody.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, settings.join_key)
        context.load_cert_chain(certificate, settings.join_key)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(
            f"VCASGD_JOIN_CERTIFICATE: {certificate} and its key can't be used: {error}",
            field="VCASGD_JOIN_CERTIFICATE",
        ) from error


def _reload(context: ssl.SSLContext, settings: Settings) -> None:
    try:
        load_certificate(context, settings)
    except SpecError as error:
        log.error("the certificate stays as it was: %s", error)
    else:
        log.info("new connections get the certificate that was read just now")


async def _run(settings: Settings) -> None:
    tls = tls_of(settings)
    services = {tensors_service(at): url for at, url in enumerate(settings.tensors_urls())}
    services[LEDGER] = settings.required("ledger_url")
    for url in services.values():
        with contextlib.suppress(StoreError):
            address_of(url)  # names a certificate that is missing at once
    ledger = connect(services[LEDGER])
    tokens, joined = KnownTokens(ApiTokens(ledger)), JoinedMachines(ledger, settings.lease_seconds)
    api_socket = Path(settings.required("api_socket"))
    gateway = Gateway(tokens, tls, services, api_socket, raise_file_limit())
    port = int(settings.required("join_port"))
    try:
        server = await asyncio.start_server(
            gateway.serve,
            settings.join_host,
            port,
            limit=limits.GATEWAY_BUFFER_BYTES,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise PortInUse(
            f"can't listen on port {port} of {settings.join_host}: {error.strerror}",
            remedy="choose another one: vcasgd up --join-port PORT",
        ) from error
    for listener in server.sockets:
        # Connections inherit it. Machines that lost their power or their network close nothing.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * PROBE_SECONDS)
    watch = asyncio.create_task(gateway.watch(joined, settings.heartbeat))
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, tls, settings)
    log.info("machines can join at port %d", port)
    await asyncio.wait(
        [asyncio.create_task(stopped.wait()), watch], return_when=asyncio.FIRST_COMPLETED
    )
    server.close()
    if watch.done():
        watch.result()


def main() -> int:
    """Serve until SIGTERM; SIGHUP reads the certificate again.

    Return the exit status: 0, or 1 after an error, which is logged.
    """
    configure_logging("gateway")
    # asyncio allocates as much for each connection, of which visitors may have a thousand.
    asyncio.sslproto.SSLProtocol.max_size = limits.GATEWAY_BUFFER_BYTES
    try:
        settings = load_settings()
        asyncio.run(_run(settings))
    except VcasgdError as error:
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
