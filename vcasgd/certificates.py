"""X.509 certificates that the platform issues itself."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Collection

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

VALID_DAYS = 3650
#: Order of the curve P-256 (SEC 2, section 2.4.2). A private key is below it.
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
#: 128 bits more than the order has, so that all keys are equally likely.
_KEY_BYTES = 48


def self_signed(name: str) -> tuple[bytes, bytes]:
    """Return a certificate that is no authority, and its key, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _certificate(name, key, name, key), _pem(key)


class Authority:
    """An authority whose key follows from a random secret, so all who know the secret are it.

    They issue certificates for each other without exchanging anything. ``name`` separates
    authorities of the same secret.
    """

    def __init__(self, secret: str, name: str) -> None:
        kdf = HKDF(hashes.SHA256(), length=_KEY_BYTES, salt=None, info=name.encode())
        number = int.from_bytes(kdf.derive(secret.encode())) % (_ORDER - 1) + 1
        self._key = ec.derive_private_key(number, ec.SECP256R1())
        self._name = name

    def certificate(self) -> bytes:
        """Return the authority's own certificate, in PEM."""
        return _certificate(self._name, self._key, self._name, self._key, authority=True)

    def issue(self, name: str, hosts: Collection[str]) -> tuple[bytes, bytes]:
        """Return a certificate for host names and addresses, and its new key, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        return _certificate(name, key, self._name, self._key, hosts=hosts), _pem(key)


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    authority: bool = False,
    hosts: Collection[str] = (),
) -> bytes:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_named(subject))
        .issuer_name(_named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The clocks of other machines differ.
        .not_valid_before(now - datetime.timedelta(days=2))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
