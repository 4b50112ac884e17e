"""The certificate that a stack makes for itself, and its pin."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

from vcasgd.local_files import write_private


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
