"""Encryption of small texts: with a key that is kept, and for one recipient."""

from __future__ import annotations

import base64
import binascii
import json

from cryptography.exceptions import InvalidTag
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

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
