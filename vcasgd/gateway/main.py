"""The gateway's process: ``python -m vcasgd.gateway.main``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path

from vcasgd.errors import PortInUse, SpecError, StoreError, Unauthorized, VcasgdError
from vcasgd.gateway.guests import Guests
from vcasgd.gateway.link import LinkMeasurements
from vcasgd.gateway.protocol import ACCEPTED, LINK, LONGEST_LINE, PROTOCOL, parse, refusal
from vcasgd.gateway.relay import BUFFER_BYTES, Stream, close, relay
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.store.address import LEDGER, address_of, tensors_service
from vcasgd.store.connection import connect
from vcasgd.store.ledger.api_tokens import ApiTokens

log = logging.getLogger(__name__)

#: Seconds for the TLS handshake, the first line, and the connection to a server.
BEGIN_SECONDS = 10.0
#: Connections that may be open, and those that have not named a service yet.
MOST_OPEN = 10_000
MOST_UNKNOWN = 500
BACKLOG = 256


class Gateway:
    """Passes connections on. ``services`` are the URLs of the servers by name."""

    def __init__(self, guests: Guests, services: Mapping[str, str], api_socket: Path) -> None:
        self._guests = guests
        self._services = services
        self._api_socket = api_socket
        self._links = LinkMeasurements()
        self._open = self._unknown = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one connection."""
        if self._open >= MOST_OPEN or self._unknown >= MOST_UNKNOWN:
            close(writer)
            return
        self._open += 1
        try:
            tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
            if tls.selected_alpn_protocol() == PROTOCOL:
                await self._serve_guest((reader, writer))
            else:
                await relay((reader, writer), await self._connect_api())
        except (OSError, TimeoutError, VcasgdError) as error:
            log.debug("%s: %s", writer.get_extra_info("peername"), error)
        except asyncio.CancelledError:
            # Its token has ended. Older versions of asyncio would log it as an error.
            pass
        finally:
            self._open -= 1
            close(writer)

    async def _serve_guest(self, guest: Stream) -> None:
        server = None
        self._unknown += 1
        try:
            async with asyncio.timeout(BEGIN_SECONDS):
                known = parse(await _first_line(guest[0]))
                if known is None or known[0] not in (LINK, *self._services):
                    raise Unauthorized("there is no such service")
                token = await self._guests.check(known[1])
                if known[0] == LINK:
                    self._links.admit(token.digest)
                else:
                    server = await self._connect(self._services[known[0]])
        except Unauthorized as error:
            guest[1].write(refusal(error.message))
            with contextlib.suppress(OSError):
                await guest[1].drain()
            raise
        finally:
            self._unknown -= 1
        try:
            with self._guests.connected(token):
                guest[1].write(ACCEPTED)
                await (self._links.serve(guest) if server is None else relay(guest, server))
        finally:
            if server is not None:
                close(server[1])

    async def _connect(self, url: str) -> Stream:
        address = await asyncio.to_thread(address_of, url)
        if address.path:
            return await asyncio.open_unix_connection(address.path, limit=BUFFER_BYTES)
        return await asyncio.open_connection(
            address.host, address.port, ssl=address.tls, limit=BUFFER_BYTES
        )

    async def _connect_api(self) -> Stream:
        async with asyncio.timeout(BEGIN_SECONDS):
            return await asyncio.open_unix_connection(str(self._api_socket), limit=BUFFER_BYTES)


async def _first_line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readuntil(b"\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise Unauthorized("the first line is incomplete") from error
    if len(line) > LONGEST_LINE:
        raise Unauthorized("the first line is too long")
    return line


def services_of(settings: Settings) -> dict[str, str]:
    """Return the URLs of the servers by name. Raises :class:`SpecError`."""
    tensors = {tensors_service(at): url for at, url in enumerate(settings.tensors_urls())}
    return {LEDGER: settings.secret("ledger_url"), **tensors}


def tls_of(settings: Settings) -> ssl.SSLContext:
    """Return the TLS configuration of the port. Raises :class:`SpecError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
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
    tls, services = tls_of(settings), services_of(settings)
    for url in services.values():
        with contextlib.suppress(StoreError):
            address_of(url)  # names a certificate that is missing at once
    guests = Guests(ApiTokens(connect(services[LEDGER])))
    gateway = Gateway(guests, services, Path(settings.required("api_socket")))
    port = int(settings.required("join_port"))
    try:
        server = await asyncio.start_server(
            gateway.serve,
            settings.join_host,
            port,
            ssl=tls,
            ssl_handshake_timeout=BEGIN_SECONDS,
            limit=BUFFER_BYTES,
            backlog=BACKLOG,
        )
    except OSError as error:
        raise PortInUse(
            f"can't listen on port {port} of {settings.join_host}: {error.strerror}",
            remedy="choose another one: vcasgd up --join-port PORT",
        ) from error
    watch = asyncio.create_task(guests.watch())
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
    try:
        settings = load_settings()
        asyncio.run(_run(settings))
    except VcasgdError as error:
        return exit_status(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
