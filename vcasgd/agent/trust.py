"""Trust in a gateway: by a pin in the token, or by well-known authorities."""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from vcasgd.client.transport import trusted
from vcasgd.errors import ApiError, SpecError
from vcasgd.gateway.relay import PROTOCOL

#: Seconds to connect.
CONNECT_SECONDS = 10.0
_PIN = re.compile(r"[0-9a-f]{64}")


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
