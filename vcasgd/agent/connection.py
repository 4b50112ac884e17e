"""Connections of an agent to the API and the servers behind a gateway, which it has to trust."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import socket
import ssl
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from vcasgd.client.transport import FILE_SECONDS, Transport, path_of, trusted
from vcasgd.errors import ApiError, Forbidden, SpecError, StackError, Unauthorized
from vcasgd.gateway.relay import ACCEPTED, PROTOCOL, Stream, close, first_line, relay
from vcasgd.limits import GATEWAY_BUFFER_BYTES
from vcasgd.schemas.joining import (
    MACHINE_SECRET,
    JoinRequest,
    JoinView,
    OrderView,
    ReportBody,
    ReportView,
)
from vcasgd.schemas.service import CallerView
from vcasgd.task.package import unpack
from vcasgd.threads import DaemonThreads

#: Seconds to connect.
CONNECT_SECONDS = 10.0
#: Seconds for each part of an answer, and for all of it: one that never ends holds nobody up.
ANSWER_SECONDS, WHOLE_ANSWER_SECONDS = 10.0, 30.0
_PIN = re.compile(r"[0-9a-f]{64}")

Result = TypeVar("Result")


@dataclass(frozen=True)
class JoinToken:
    """Token for machines that join: the bearer token, and the pin of the certificate, if any."""

    text: str
    pin: str | None = None

    def __repr__(self) -> str:
        return f"JoinToken(pin={self.pin!r})"

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Return the parts of what ``vcasgd token create --join`` printed."""
        token, _, pin = text.strip().partition(".")
        if pin and not _PIN.fullmatch(pin):
            raise SpecError(
                "the token is incomplete", remedy="copy it again, with everything after the point"
            )
        return cls(token, pin or None)


@dataclass(frozen=True)
class GatewayAddress:
    """Address of a gateway, and the TLS configurations for the API and the servers behind it."""

    url: str
    host: str
    port: int
    api_tls: ssl.SSLContext
    server_tls: ssl.SSLContext

    @classmethod
    def of(cls, url: str, pin: str | None, ca_file: Path | None = None) -> GatewayAddress:
        """Return the gateway at a URL.

        With a pin, it connects, and the certificate must be that one. Raises :class:`SpecError`,
        and :class:`ApiError` if the gateway doesn't answer or has another certificate.
        """
        parts = urlsplit(url if "//" in url else f"https://{url}")
        try:
            host, port = parts.hostname, parts.port or 443
        except ValueError as error:
            raise SpecError(f"{url}: {error}", field="url") from error
        if parts.scheme != "https" or not host:
            raise SpecError(f"{url} is not of the form https://host:port", field="url")
        pem = _pinned(host, port, pin) if pin else None
        api, server = _context(pem, ca_file), _context(pem, ca_file)
        server.set_alpn_protocols([PROTOCOL])
        return cls(f"https://{parts.netloc}", host, port, api, server)


def _context(pem: str | None, ca_file: Path | None) -> ssl.SSLContext:
    if pem is None:
        return trusted(ca_file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate itself is known, so its name doesn't matter.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=pem)
    return context


def _pinned(host: str, port: int, pin: str) -> str:
    """Return the certificate of a gateway, in PEM, if it has this pin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as tls,
        ):
            certificate = tls.getpeercert(binary_form=True) or b""
    except OSError as error:
        raise ApiError(
            f"no answer from {host} port {port}: {error}",
            remedy="check the address, and that this network allows outgoing connections to it",
        ) from error
    if hashlib.sha256(certificate).hexdigest() != pin:
        raise ApiError(
            f"{host} port {port} has another certificate than the token names",
            remedy="check the address, or ask for a new token; someone may be listening in",
        )
    return ssl.DER_cert_to_PEM_cert(certificate)


class AgentConnection:
    """Connection to the API. Methods raise :class:`~vcasgd.errors.ApiError`.

    All but :meth:`fetch_code` return within ``seconds``.
    """

    def __init__(
        self,
        gateway: GatewayAddress,
        token: JoinToken,
        secret: str,
        seconds: float = WHOLE_ANSWER_SECONDS,
    ) -> None:
        """``secret``: random text that shows requests of this machine."""
        self._gateway = gateway
        self._token = token
        self._secret = secret
        self._seconds = seconds
        self._api = self._new_transport()
        # A report may be in progress when the machine leaves.
        self._threads = DaemonThreads(2, "api")
        self._machine = ""

    def _new_transport(self) -> Transport:
        return Transport(
            self._gateway.url,
            self._token.text,
            ANSWER_SECONDS,
            tls=self._gateway.api_tls,
            headers={MACHINE_SECRET: self._secret},
        )

    def _limited(self, call: Callable[[Transport], Result]) -> Result:
        """Return the result of a call. Raises :class:`ApiError` if it takes too long."""
        future = self._threads.submit(call, self._api)
        try:
            result: Result = future.result(self._seconds)
        except TimeoutError as error:
            # The call ends with its connection.
            self._api.close()
            self._api = self._new_transport()
            raise ApiError(
                f"no complete answer from {self._gateway.url} within {self._seconds:g} s"
            ) from error
        return result

    def close(self) -> None:
        self._api.close()

    def check_token(self) -> None:
        """Raise :class:`Unauthorized` unless the token is valid, before anything else takes long.

        Only requests of a valid token are forbidden: one for joining reads nothing.
        """
        with _clear_refusals(self._token):
            try:
                caller = self._limited(lambda api: api.get(CallerView, "me"))
            except Forbidden:
                return
        raise Unauthorized(
            f"the token {caller.name} has scope {caller.scope}, and machines need scope join",
            remedy="use the one that vcasgd token create NAME --join printed",
        )

    def join(self, machine: JoinRequest) -> JoinView:
        """Join. Raises :class:`~vcasgd.errors.Conflict` with the reason if that isn't possible."""
        # Fields without a value are left out, so that an older stack can answer that it is older.
        with _clear_refusals(self._token):
            fields = machine.model_dump(exclude_none=True)
            view = self._limited(lambda api: api.post(JoinView, "join", fields))
        self._machine = view.machine
        return view

    def report(self, body: ReportBody) -> ReportView:
        """Report the state of the machine.

        Raises :class:`~vcasgd.errors.NotFound` if the machine was removed.
        """
        path = path_of("machines", self._machine, "report")
        with _clear_refusals(self._token):
            return self._limited(lambda api: api.post(ReportView, path, body.model_dump()))

    def fetch_code(self, order: OrderView, into: Path, limit_bytes: int | None = None) -> None:
        """Fetch and unpack the code of a job, of up to ``limit_bytes``.

        Raises :class:`~vcasgd.errors.PackageError`.
        """
        if (into / order.package).is_dir():
            return
        path = path_of("machines", self._machine, "packages", order.package)
        # Over a connection of its own, which isn't closed by the others.
        with closing(self._new_transport()) as api:
            response = api.call("GET", path, timeout=FILE_SECONDS)
        unpack(response.content, order.package, into, limit_bytes)

    def leave(self) -> None:
        self._limited(lambda api: api.call("DELETE", path_of("machines", self._machine)))


@contextmanager
def _clear_refusals(token: JoinToken) -> Iterator[None]:
    """Raise errors about the token for people who only have this token."""
    try:
        yield
    except Unauthorized as error:
        expired = "expired" in error.message
        raise Unauthorized(
            error.message if expired else "the token is wrong or was revoked",
            remedy="ask for a new one where you got it",
            **error.details,
        ) from error
    except ApiError as error:
        if token.pin is not None or "is not trusted" not in error.message:
            raise
        raise Unauthorized(
            f"the token names no certificate, as tokens for joining do, and {error.message}",
            remedy="use the whole token that vcasgd token create NAME --join printed; for a "
            "certificate of your own authority, set VCASGD_CA_FILE",
        ) from error


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
        with suppress(RuntimeError):  # It has ended by itself.
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
                log.warning("%s: %s", service, str(error) or "no answer")
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
