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

from vcasgd.cluster.commands import (
    PASSWORD_VARIABLE,
    Command,
    confinement,
    ray_command,
    stable,
)
from vcasgd.errors import SpecError, StoreUnavailable, VcasgdError
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.store.sentinel import primary_url

#: Ray's default folder.
DEFAULT_DIR = Path(tempfile.gettempdir()) / "ray"


#: Ray's variables for the options of a redis-py URL.
_TLS_FILES = {
    "ssl_ca_certs": "RAY_REDIS_CA_CERT",
    "ssl_certfile": "RAY_REDIS_CLIENT_CERT",
    "ssl_keyfile": "RAY_REDIS_CLIENT_KEY",
}


def head_command(
    settings: Settings, *, address: str, ledger_url: str, temp_dir: Path, token: str | None
) -> Command | None:
    """Return the command of the head: Ray's control service, without resources for workers.

    The process runs until it is killed. It exits on its own if one of its parts or the ledger dies,
    also during its start, or if the ledger is unavailable for a minute. The same command restarts
    it from its state in the ledger. It is ready after about four seconds.

    ``address`` is ``host:port``. Returns None if no Sentinel names the ledger's primary. Raises
    :class:`~vcasgd.errors.ClusterError` if ``temp_dir`` is too long, and
    :class:`~vcasgd.errors.SpecError` if ``address`` has no port.
    """
    host, port = _host_and_port(address)
    # Ray accepts one address. After a failover the head is restarted with the new one.
    url = primary_url(ledger_url)
    if url is None:
        return None
    ledger = urlsplit(url)
    tls = ledger.scheme == "rediss"
    env = {
        **confinement(host),
        "RAY_REDIS_ADDRESS": f"{'rediss://' if tls else ''}{ledger.hostname}:{ledger.port or 6379}",
        # Separates clusters that share a ledger.
        "RAY_external_storage_namespace": settings.cluster,
    }
    for name, value in parse_qsl(ledger.query):
        if tls and name in _TLS_FILES:
            env[_TLS_FILES[name]] = value
    if ledger.password:
        env[PASSWORD_VARIABLE] = unquote(ledger.password)
    flags = ["--head", str(port), "--node-ip-address", stable(host)]
    return ray_command(flags, env, temp_dir, settings.heartbeat, token, tls=settings.ray_tls)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise SpecError(
            f"VCASGD_RAY_ADDRESS: {address} is not of the form host:port",
            field="VCASGD_RAY_ADDRESS",
        )
    return host, int(port)


def _from_settings(settings: Settings) -> Command:
    head = head_command(
        settings,
        address=settings.required("ray_address"),
        ledger_url=settings.required("ledger_url"),
        temp_dir=settings.ray_dir / "head" if settings.ray_dir else DEFAULT_DIR,
        token=settings.required("ray_token"),
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
