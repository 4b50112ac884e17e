"""TLS to the servers: what a ``rediss://`` URL says of it, and what its failures mean.

The URL has everything, under the names that redis-py gives to it, so that no process needs
more than the URL::

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
#: how the standard library begins the text of a handshake that nobody answered
_HANDSHAKE_TIMED_OUT = "_ssl.c"


def tls_options(url: str) -> dict[str, Any]:
    """What a client is given beside the URL, which can override it; nothing without TLS.

    Raises :class:`StoreError` where a file that the URL names can't be read: later it would
    look like a server that is away.
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
                    remedy="it is a file in PEM format on each machine that uses the URL",
                )
    # older libraries don't compare the host's name unless they are told to
    return {"ssl_check_hostname": True, "ssl_cert_reqs": "required"}


def tls_error(error: BaseException) -> StoreError | None:
    """What a lost or refused connection means, where TLS is the reason; None where it is not."""
    cause = _tls_cause(error)
    if cause is None:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return StoreDenied(
            f"the store's certificate is not accepted: {cause.verify_message}",
            remedy="name its authority in the URL, ?ssl_ca_certs=FILE, and a host that is in it",
        )
    if isinstance(cause, TimeoutError):
        return StoreUnavailable(
            "the store does not answer: no TLS handshake",
            remedy="if this port does not speak TLS, write redis://",
        )
    if isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return StoreUnavailable(
            "the store does not answer: it ended the TLS connection",
            remedy="if it wants a certificate of its clients, ?ssl_certfile=FILE&ssl_keyfile=FILE",
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
