"""Addresses of the servers, for connections that only pass bytes on."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vcasgd.errors import StoreError
from vcasgd.store.connection import connect
from vcasgd.store.replies import mapped_errors
from vcasgd.store.sentinel import SCHEMES
from vcasgd.store.tls import tls_options

#: Name of the ledger among the services of a stack.
LEDGER = "ledger"
_PORT = 6379


def tensors_service(node: int) -> str:
    """Return the name of a store node's tensors server among the services of a stack."""
    return f"tensors-{node}"


@dataclass(frozen=True)
class ServerAddress:
    """Address where a server listens: ``host`` and ``port``, or the Unix socket ``path``."""

    host: str = ""
    port: int = 0
    path: str = ""
    tls: ssl.SSLContext | None = field(default=None, compare=False)


def address_of(url: str) -> ServerAddress:
    """Return the address in a URL; with Sentinel, that of the present primary.

    Raises :class:`StoreError`.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return ServerAddress(path=parts.path)
    tls = _context(url) if parts.scheme.startswith("rediss") else None
    if url.startswith(SCHEMES):
        pool: Any = connect(url).connection_pool
        with mapped_errors():
            host, port = pool.get_master_address()
        return ServerAddress(host, int(port), tls=tls)
    return ServerAddress(parts.hostname or "localhost", parts.port or _PORT, tls=tls)


def _context(url: str) -> ssl.SSLContext:
    """Return the TLS configuration that redis-py would use for a URL."""
    tls_options(url)
    query = {name: values[-1] for name, values in parse_qs(urlsplit(url).query).items()}
    try:
        context = ssl.create_default_context()
        if "ssl_ca_certs" in query:
            context.load_verify_locations(query["ssl_ca_certs"])
        if "ssl_certfile" in query:
            context.load_cert_chain(query["ssl_certfile"], query.get("ssl_keyfile"))
    except (OSError, ssl.SSLError) as error:
        raise StoreError(
            f"the certificates in the URL of a store can't be used: {error}"
        ) from error
    context.check_hostname = query.get("ssl_check_hostname", "true").lower() != "false"
    return context
