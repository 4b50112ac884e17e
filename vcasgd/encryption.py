"""Encryption of small texts, with a key that is kept or for one recipient, and certificates."""

from __future__ import annotations

import base64
import binascii
import datetime
import ipaddress
import json
from collections.abc import Collection

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

#: HPKE (RFC 9180) in base mode: anyone can encrypt, and only the recipient can decrypt.
_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


class Undecipherable(ValueError):
    """The key is another one, or the text was changed or belongs elsewhere."""


class StorageCipher:
    """Encrypts texts for storage with a key that is derived from a random ``secret`` (Fernet).

    ``place`` names what a text belongs to. A text that was moved elsewhere can't be decrypted.
    """

    def __init__(self, secret: str) -> None:
        kdf = HKDF(hashes.SHA256(), length=32, salt=None, info=b"vcasgd storage")
        self._fernet = Fernet(base64.urlsafe_b64encode(kdf.derive(secret.encode())))

    def encrypt(self, text: str, place: str) -> str:
        return self._fernet.encrypt(json.dumps([place, text]).encode()).decode()

    def decrypt(self, token: str, place: str) -> str:
        """Return the text. Raises :class:`Undecipherable`."""
        try:
            actual, text = json.loads(self._fernet.decrypt(token))
        except InvalidToken:
            raise Undecipherable("encrypted with another key, or damaged") from None
        if actual != place:
            raise Undecipherable(f"belongs to {actual}")
        return str(text)


class Recipient:
    """Decrypts what :func:`encrypt_for` encrypts for it. Its key never leaves this object."""

    def __init__(self) -> None:
        self._key = X25519PrivateKey.generate()

    @property
    def address(self) -> str:
        """The public key."""
        return base64.b64encode(self._key.public_key().public_bytes_raw()).decode()

    def decrypt(self, message: str, place: str) -> str:
        """Return the text. Raises :class:`Undecipherable`."""
        try:
            return _SUITE.decrypt(base64.b64decode(message), self._key, place.encode()).decode()
        except (InvalidTag, ValueError):
            raise Undecipherable("encrypted for another recipient, or damaged") from None


def encrypt_for(address: str, text: str, place: str) -> str:
    """Encrypt a text for one recipient. Raises :class:`ValueError` if there is no such address."""
    try:
        raw = base64.b64decode(address, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    message = _SUITE.encrypt(text.encode(), X25519PublicKey.from_public_bytes(raw), place.encode())
    return base64.b64encode(message).decode()


# --- X.509 certificates that the platform issues itself ---------------------------------------

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
