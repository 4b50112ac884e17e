"""Connections through the port for joining, and the pin of its certificate, for both sides.

A connection to a server behind the gateway has a first line, and then any bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import Callable
from pathlib import Path

from vcasgd.limits import GATEWAY_BUFFER_BYTES
from vcasgd.local_files import write_private

#: Protocol that a TLS client names (ALPN).
PROTOCOL = "vcasgd/1"
#: Answer to a first line that is accepted; others are ``-`` and the reason.
ACCEPTED = b"+\n"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def first_line(service: str, token: str) -> bytes:
    """Return the line for a service."""
    return f"{service} {token}\n".encode()


async def relay(
    one: Stream, other: Stream, sent: Callable[[int], None], received: Callable[[int], None]
) -> None:
    """Pass bytes on in both directions until one side ends, then close both.

    ``sent`` and ``received`` get the number of bytes from ``one`` to ``other``, and back.
    """
    tasks = [
        asyncio.create_task(_pump(one[0], other[1], sent)),
        asyncio.create_task(_pump(other[0], one[1], received)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        close(one[1])
        close(other[1])


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None]
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(GATEWAY_BUFFER_BYTES):
            writer.write(data)
            count(len(data))
            await writer.drain()


def close(writer: asyncio.StreamWriter) -> None:
    """Close a connection, without waiting for the other side."""
    with contextlib.suppress(OSError, RuntimeError):
        writer.close()


def pin_of(pem: str) -> str:
    """Return the SHA-256 of the first certificate of a PEM file, in hexadecimal."""
    end = pem.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
    first = pem[pem.index("-----BEGIN CERTIFICATE-----") : end]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()


def ensure_certificate(certificate: Path, key: Path) -> str:
    """Return the pin of a certificate; make it first if there is none."""
    if not (certificate.exists() and key.exists()):
        certificate.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Most commands don't need the library.
        from vcasgd.encryption import self_signed

        # Tokens contain the pin, so a new certificate makes all of them useless.
        made, secret = self_signed("vcasgd")
        write_private(key, secret)
        certificate.write_bytes(made)
    return pin_of(certificate.read_text())
