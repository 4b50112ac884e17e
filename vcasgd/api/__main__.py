"""The API's process: ``python -m vcasgd.api``."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from vcasgd.api.app import create_app
from vcasgd.api.connections import BoundedConnection, BoundedServer, max_connections
from vcasgd.container_limits import raise_file_limit
from vcasgd.errors import PortInUse, SpecError, StackError, StoreUnavailable, VcasgdError
from vcasgd.limits import MAX_CONNECTIONS
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient, connect, patiently
from vcasgd.store.ledger.control import Control

log = logging.getLogger(__name__)

#: Seconds to wait for the ledger; people wait for the response, and clients retry.
ANSWER_SECONDS = 3.0
#: Seconds that requests in progress have to end after SIGTERM.
GRACE_SECONDS = 3
#: Seconds that an idle connection stays open: longer than clients and load balancers keep theirs
#: (5 s and, on AWS, 60 s). They could otherwise send a request into one that is just closed.
IDLE_SECONDS = 75
#: Connections that wait to be accepted.
BACKLOG = 1024


def main() -> int:
    """Serve until SIGTERM. Return the exit status: 0, or 1 after an error, which is logged."""
    configure_logging("api")
    try:
        settings = load_settings()
        configure_logging("api", _log_level(settings))
        # Its warnings are of requests of strangers, who could replace all of the log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        ledger = connect(
            settings.required("ledger_url"), answer_seconds=ANSWER_SECONDS, over_limit=True
        )
        _claim(settings, ledger)
        storage = Storage(settings.required("storage_url"))
        app = create_app(settings, ledger, storage)
        files = raise_file_limit()
        if max_connections() < MAX_CONNECTIONS:
            log.warning("%d open files allow %d connections", files, max_connections())
        config = uvicorn.Config(
            BehindGateway(app), http=BoundedConnection, log_config=None, access_log=False
        )
        with listen(settings) as listener, listen_for_gateway(settings) as further:
            serve(config, [listener, *further])
    except VcasgdError as error:
        return exit_status(error)
    return 0


def _claim(settings: Settings, ledger: RedisClient) -> None:
    """Claim the ledger for this cluster, if it is available.

    The API also runs without a ledger; the other processes check the claim later.
    """
    try:
        patiently(lambda: Control(ledger).claim(settings.cluster), settings.lease_seconds)
    except StoreUnavailable as error:
        log.warning("ledger: %s", error)


def _log_level(settings: Settings) -> str:
    level = settings.log_level.upper()
    if level not in logging.getLevelNamesMapping():
        raise SpecError(f"VCASGD_LOG_LEVEL: {level} is not a log level", field="VCASGD_LOG_LEVEL")
    return level


def listen(settings: Settings) -> socket.socket:
    """Open the socket that ``api_url`` names.

    Raises :class:`PortInUse`, :class:`SpecError`, and :class:`StackError` if this machine lacks
    the address or forbids the port.
    """
    host, port = _address(settings.api_url)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} of {host} is in use",
                remedy="stop the process that uses it, or set VCASGD_API_URL to another port",
                port=port,
            ) from error
        raise StackError(
            f"can't listen on {host} port {port}: {error.strerror}",
            remedy="set VCASGD_API_URL to an address of this machine",
        ) from error


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SpecError(f"VCASGD_API_URL: {url}: {error}", field="VCASGD_API_URL") from error
    if parts.scheme not in ("http", "https") or host is None:
        raise SpecError(
            f"VCASGD_API_URL: {url} must have the form http://host:port", field="VCASGD_API_URL"
        )
    return host, port or (443 if parts.scheme == "https" else 80)


class BehindGateway:
    """Marks the requests that came through the gateway as encrypted.

    They arrive at a Unix socket, so they have no client. Nothing takes them for local ones.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("client") is None:
            scope["scheme"] = "https"
        await self._app(scope, receive, send)


@contextlib.contextmanager
def listen_for_gateway(settings: Settings) -> Iterator[list[socket.socket]]:
    """Open the socket that ``api_socket`` names, if any; only this user can connect to it.

    Raises :class:`StackError`.
    """
    path = settings.api_socket
    if path is None:
        yield []
        return
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(BACKLOG)
        except OSError as error:
            raise StackError(
                f"can't listen on {path}: {error}",
                remedy="set VCASGD_API_SOCKET to a short path in a writable folder",
            ) from error
        yield [listener]


def serve(config: uvicorn.Config, listeners: list[socket.socket]) -> None:
    """Serve until SIGTERM or SIGINT, then give requests in progress a few seconds to end."""
    config.timeout_graceful_shutdown = GRACE_SECONDS
    config.timeout_keep_alive = IDLE_SECONDS
    server = BoundedServer(config)

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn restores this handler and raises the signal again when it has stopped; a requested
    # stop is no failure
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run(sockets=listeners)


if __name__ == "__main__":
    sys.exit(main())
