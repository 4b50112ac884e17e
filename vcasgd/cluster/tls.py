"""TLS of Ray's traffic, with certificates that follow from Ray's token.

Ray's processes show each other certificates of one authority. Its key is derived from the token,
which all of them have, and which allows running code on every machine anyway.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from vcasgd.errors import SpecError
from vcasgd.local_files import write_private

#: Set to 1 for processes that encrypt Ray's traffic.
VARIABLE = "VCASGD_RAY_TLS"
#: Fewest characters of a token. Anyone can test guesses with a certificate that Ray shows.
MIN_TOKEN = 32
#: Loopback addresses under which Ray knows a machine; see :func:`~.commands.stable`.
LOOPBACK = ("localhost", "127.0.0.1")


def own_address(address: str) -> str:
    """Return the address of this machine that reaches ``address``, which is ``host:port``."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def use(token: str, host: str, folder: Path | None = None) -> None:
    """Set Ray's variables for a process that Ray knows as ``host``.

    ``folder`` is for the files that they name. Without one, they are in memory, where only this
    process finds them. Raises :class:`SpecError` if the token is short.
    """
    if len(token) < MIN_TOKEN:
        raise SpecError(
            f"VCASGD_RAY_TOKEN: has {len(token)} characters; with VCASGD_RAY_TLS it needs"
            f" at least {MIN_TOKEN}, chosen at random",
            field="VCASGD_RAY_TOKEN",
        )
    from vcasgd.encryption import Authority

    authority = Authority(token, "vcasgd ray")
    certificate, key = authority.issue("ray", sorted({host, *LOOPBACK}))
    content = {"CA_CERT": authority.certificate(), "SERVER_CERT": certificate, "SERVER_KEY": key}
    for name, pem in content.items():
        os.environ[f"RAY_TLS_{name}"] = _stored(name, pem, folder)
    os.environ["RAY_USE_TLS"] = "1"


def _stored(name: str, content: bytes, folder: Path | None) -> str:
    """Return the path of the content, which is kept as long as the folder or the process is."""
    if folder is None:
        file = os.memfd_create(name)
        os.write(file, content)
        return f"/proc/self/fd/{file}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{name.lower()}.pem"
    write_private(path, content)
    return str(path)
