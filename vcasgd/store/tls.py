"""TLS to the servers: options from a ``rediss://`` URL, and errors for failed handshakes.

The URL contains all options under redis-py's names, so a process needs only the URL::

    rediss://:password@host:6380/0?ssl_ca_certs=/etc/vcasgd/ca.pem
        &ssl_certfile=/etc/vcasgd/client.pem&ssl_keyfile=/etc/vcasgd/client.key
"""

from __future__ import annotations

import os
import ssl
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vcasgd.errors import StoreDenied, StoreError, StoreUnavailable

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
#: Start of the standard library's error text if no answer to a handshake arrived.
_HANDSHAKE_TIMED_OUT = "_ssl.c"


def tls_options(url: str) -> dict[str, Any]:
    """Return a client's TLS options, which the URL can override; none without TLS.

    Raises :class:`StoreError` if a file in the URL can't be read, because later this would look
    like an unavailable server.
    """
    parts = urlsplit(url)
    if not parts.scheme.startswith("rediss"):
        return {}
    query = parse_qs(parts.query)
    for option in _FILES:
        for path in query.get(option, []):
            if not os.access(path, os.R_OK):
                raise StoreError(
                    f"{option}={path} in the URL of a store can't be read",
                    remedy="put this PEM file on each machine that uses the URL",
                )
    # Older versions of the library check the host's name only on request.
    return {"ssl_check_hostname": True, "ssl_cert_reqs": "required"}


def tls_error(error: BaseException) -> StoreError | None:
    """Return our error for a connection that failed because of TLS; None for other reasons."""
    cause = _tls_cause(error)
    if cause is None:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return StoreDenied(
            f"the store's certificate is not accepted: {cause.verify_message}",
            remedy="name its authority in the URL, ?ssl_ca_certs=FILE, and a host that it covers",
        )
    if isinstance(cause, TimeoutError):
        return StoreUnavailable(
            "the store does not answer: no TLS handshake",
            remedy="if this port does not use TLS, write redis://",
        )
    if isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return StoreUnavailable(
            "the store does not answer: it closed the TLS connection",
            remedy="if it requires client certificates, add ?ssl_certfile=FILE&ssl_keyfile=FILE",
        )
    return StoreDenied(
        f"no TLS connection to the store: {cause.reason or cause}",
        remedy="check ssl_ca_certs, ssl_certfile and ssl_keyfile in its URL, and its port",
    )


def _tls_cause(error: BaseException | None) -> ssl.SSLError | TimeoutError | None:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        if isinstance(error, TimeoutError) and str(error).startswith(_HANDSHAKE_TIMED_OUT):
            return error
        error = error.__cause__ or error.__context__
    return None
