"""Ray's head as its own process: ``python -m vcasgd.cluster.head``.

The process is replaced by Ray's. Its state is in the ledger, so the same command restarts it where
it stopped. It listens on ``VCASGD_RAY_ADDRESS``, which must be an address of this machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

from vcasgd.cluster import Command, head_command
from vcasgd.errors import SpecError, StoreUnavailable, VcasgdError
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.store.sentinel import primary_url

#: Ray's default folder.
DEFAULT_DIR = Path(tempfile.gettempdir()) / "ray"


def command(
    settings: Settings, *, address: str, ledger_url: str, temp_dir: Path, token: str | None
) -> Command | None:
    """Return the command that starts the head, or None if no Sentinel names the ledger's primary.

    ``address`` is ``host:port``. Raises :class:`~vcasgd.errors.ClusterError` if ``temp_dir`` is
    too long, and :class:`~vcasgd.errors.SpecError` if ``address`` has no port.
    """
    host, port = _host_and_port(address)
    # Ray accepts one address. After a failover the head is restarted with the new one.
    url = primary_url(ledger_url)
    if url is None:
        return None
    ledger = urlsplit(url)
    tls = ledger.scheme == "rediss"
    return head_command(
        host=host,
        port=port,
        ledger_address=f"{'rediss://' if tls else ''}{ledger.hostname}:{ledger.port or 6379}",
        ledger_files={
            name: value
            for name, value in parse_qsl(ledger.query)
            if tls and name.startswith("ssl_")
        },
        ledger_password=unquote(ledger.password) if ledger.password else None,
        namespace=settings.cluster,
        temp_dir=temp_dir,
        heartbeat=settings.heartbeat,
        token=token,
        tls=settings.ray_tls,
    )


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise SpecError(
            f"VCASGD_RAY_ADDRESS: {address} is not of the form host:port",
            field="VCASGD_RAY_ADDRESS",
        )
    return host, int(port)


def _from_settings(settings: Settings) -> Command:
    head = command(
        settings,
        address=settings.required("ray_address"),
        ledger_url=settings.secret("ledger_url"),
        temp_dir=settings.ray_dir / "head" if settings.ray_dir else DEFAULT_DIR,
        token=settings.secret("ray_token"),
    )
    if head is None:
        raise StoreUnavailable("no Sentinel names a primary of the ledger")
    return head


def main() -> NoReturn:
    """Become Ray's head. Exits with status 1 after an error; its supervisor restarts it."""
    configure_logging("head")
    try:
        head = _from_settings(load_settings())
    except VcasgdError as error:
        sys.exit(exit_status(error))
    os.execve(head.argv[0], head.argv, {**os.environ, **head.env})


if __name__ == "__main__":
    main()
