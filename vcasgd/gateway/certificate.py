"""The certificate that a stack makes for itself, and its pin."""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from pathlib import Path

#: Validity. Tokens contain the pin, so a new certificate makes all of them useless.
VALID_DAYS = 3650


def pin_of(pem: str) -> str:
    """Return the SHA-256 of the first certificate of a PEM file, in hexadecimal."""
    end = pem.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
    first = pem[pem.index("-----BEGIN CERTIFICATE-----") : end]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()


def ensure_certificate(certificate: Path, key: Path) -> str:
    """Return the pin of a certificate; make it first if there is none."""
    if not (certificate.exists() and key.exists()):
        certificate.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        made, secret = _make()
        with os.fdopen(os.open(key, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(secret)
        certificate.write_bytes(made)
    return pin_of(certificate.read_text())


def _make() -> tuple[bytes, bytes]:
    """Return a self-signed certificate and its key, in PEM."""
    # Most commands don't need the library.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vcasgd")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        # the clocks of machines elsewhere differ
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    key = secret.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key
