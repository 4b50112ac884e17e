"""Discovery of servers: the primary that Redis Sentinel names, and the address in a URL.

``redis+sentinel://[user:password@]host:port[,host:port…]/service[/db][?options]``

The URL contains all options of TLS under redis-py's names, so a process needs only the URL::

    rediss://:password@host:6380/0?ssl_ca_certs=/etc/vcasgd/ca.pem
        &ssl_certfile=/etc/vcasgd/client.pem&ssl_keyfile=/etc/vcasgd/client.key
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelManagedConnection

from vcasgd.errors import StoreError
from vcasgd.store.pipeline import mapped_errors

SCHEMES = ("redis+sentinel", "rediss+sentinel")
SERVER_PORT, SENTINEL_PORT = 6379, 26379
#: Sentinels answer from memory; one that needs longer is skipped.
SENTINEL_SECONDS = 1.0
#: Answers of a server that no longer is the primary, or must not act as one.
_DEPOSED = ("READONLY", "NOREPLICAS", "UNBLOCKED", "MASTERDOWN")

#: Options of TLS that name files.
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

Address = tuple[str, int]


def tls_options(url: str) -> dict[str, Any]:
    """Return a client's TLS options, which the URL can override; none without TLS.

    Raises :class:`StoreError` if a file in the URL can't be read, because later this would look
    like an unavailable server.
    """
    parts = urlsplit(url)
    if not parts.scheme.startswith("rediss"):
        return {}
    query = parse_qs(parts.query)
    for option in _FILES:
        for path in query.get(option, []):
            if not os.access(path, os.R_OK):
                raise StoreError(
                    f"{option}={path} in the URL of a store can't be read",
                    remedy="put this PEM file on each machine that uses the URL",
                )
    # Older versions of the library check the host's name only on request.
    return {"ssl_check_hostname": True, "ssl_cert_reqs": "required"}


@dataclass(frozen=True)
class SentinelUrl:
    """A parsed URL. ``options`` are arguments of redis-py's connections, with the credentials."""

    hosts: tuple[tuple[str, int], ...]
    service: str
    tls: bool
    options: dict[str, Any] = field(repr=False)
    sentinel_options: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Parse a URL. Raises :class:`ValueError`, whose text contains no part of the URL."""
        parts = urlsplit(url)
        credentials, _, hosts = parts.netloc.rpartition("@")
        service, _, database = parts.path.strip("/").partition("/")
        if parts.scheme not in SCHEMES or not hosts or not service:
            raise ValueError("not the URL of a service of Sentinel")
        user = f"{credentials}@" if credentials else ""
        options = parse_url(f"redis://{user}unused/{database or 0}?{parts.query}")
        del options["host"]
        sentinel = {
            name: options.pop(f"sentinel_{name}")
            for name in ("username", "password")
            if f"sentinel_{name}" in options
        }
        tls = parts.scheme == "rediss+sentinel"
        if tls:
            sentinel |= {name: each for name, each in options.items() if name.startswith("ssl_")}
        return cls(
            tuple(_host(each) for each in hosts.split(",")), unquote(service), tls, options,
            {**sentinel, "ssl": tls},
        )  # fmt: skip


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a Sentinel has no host")
    return parts.hostname, parts.port or SENTINEL_PORT


def expect_primary(connection: Any) -> None:
    """Raise :class:`redis.ConnectionError` if a new connection does not lead to a primary.

    Sentinel's answer may be older than the failover, and a replica answers reads.
    """
    # HELLO contains the role; the ROLE command requires an administrator.
    connection.send_command("HELLO", 2)
    answer = connection.read_response()
    if dict(zip(answer[::2], answer[1::2], strict=True))[b"role"] != b"master":
        raise redis.ConnectionError("the server is a replica")


class _ToPrimary(SentinelManagedConnection):  # type: ignore[misc]  # the library has no types
    """A connection that closes as soon as its server turns out not to be the primary."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as error:
            kinds = (redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError)
            if not isinstance(error, kinds) and not str(error).startswith(_DEPOSED):
                raise
            # The next use of this connection asks Sentinel again.
            self.disconnect()
            raise redis.ConnectionError(
                f"the server is not a primary that accepts writes: {error}"
            ) from error


class _ToPrimaryByTls(_ToPrimary, SSLConnection):  # type: ignore[misc]
    pass


class _Sentinels(Sentinel):  # type: ignore[misc]
    """Sentinels of which a majority is asked; the newest configuration wins.

    The library uses the first answer, which may come from the one Sentinel that was cut off
    together with the old primary.
    """

    def discover_master(self, service_name: str) -> Address:
        known, errors = self._ask(service_name)
        if not known:
            names = ", ".join(type(error).__name__ for error in errors)
            # The cause shows whether a certificate was refused.
            raise MasterNotFoundError(
                f"no Sentinel knows a primary of {service_name!r}: {names}"
            ) from errors[-1]
        return max(known)[1]

    def confirmed_primary(self, service: str) -> Address | None:
        """Return the primary in a majority's newest configuration; None without a majority."""
        known, _ = self._ask(service)
        return max(known)[1] if len(known) > len(self.sentinels) // 2 else None

    def _ask(self, service: str) -> tuple[list[tuple[int, Address]], list[redis.RedisError]]:
        """Return epoch and address from a majority, if it answers, and the errors of the others."""
        known: list[tuple[int, Address]] = []
        errors: list[redis.RedisError] = []
        for sentinel in self.sentinels:
            try:
                state = sentinel.sentinel_master(service)
            except redis.RedisError as error:
                errors.append(error)
                continue
            known.append((int(state["config-epoch"]), (str(state["ip"]), int(state["port"]))))
            if len(known) > len(self.sentinels) // 2:
                break
        return known, errors


def _sentinels_of(
    url: SentinelUrl, seconds: float = SENTINEL_SECONDS, **options: Any
) -> _Sentinels:
    """Return the Sentinels of a URL, with these options of redis-py, which the URL overrides."""
    seconds = min(SENTINEL_SECONDS, seconds)
    return _Sentinels(
        url.hosts,
        sentinel_kwargs={
            "retry": Retry(NoBackoff(), 0),
            **options,
            **url.sentinel_options,
            "socket_timeout": seconds,
            "socket_connect_timeout": seconds,
        },
    )


def primary_of(
    url: SentinelUrl, client_class: type[redis.Redis], **options: Any
) -> tuple[Any, Callable[[], None]]:
    """Return a client of a service's current primary, and a function that checks it.

    The function raises :class:`redis.ConnectionError` unless a majority of the Sentinels
    confirms that the client's server is still the primary.
    """
    sentinels = _sentinels_of(
        url,
        **{name: value for name, value in options.items() if name.startswith("ssl_")},
        **{name: options[name] for name in ("retry", "protocol", "socket_keepalive")},
        seconds=options["socket_timeout"],
    )
    client = sentinels.master_for(
        url.service,
        redis_class=client_class,
        connection_class=_ToPrimaryByTls if url.tls else _ToPrimary,
        **{**options, **url.options},
    )
    pool: Any = client.connection_pool

    def confirm() -> None:
        if sentinels.confirmed_primary(url.service) != pool.master_address:
            # Threads would fail with any error if their connections were closed. As the pool knows
            # the primary's address from here on, it closes those to other servers when it gets them
            # back.
            pool.disconnect(inuse_connections=False)
            pool.get_master_address()
            raise redis.ConnectionError("the server may no longer be the primary")

    return client, confirm


def named_primary(url: str) -> Address | None:
    """Return host and port of the primary of a service's URL; None without a majority."""
    parsed = SentinelUrl.parse(url)
    sentinels = _sentinels_of(parsed, **tls_options(url))
    with sentinels:
        return sentinels.confirmed_primary(parsed.service)


def primary_url(url: str) -> str | None:
    """Return the URL of the primary itself, for clients without support for Sentinel.

    Returns None if no majority of the Sentinels answers, and other URLs unchanged.
    """
    if not url.startswith(SCHEMES):
        return url
    parts = urlsplit(url)
    primary = named_primary(url)
    if primary is None:
        return None
    credentials, at, _ = parts.netloc.rpartition("@")
    host = f"[{primary[0]}]" if ":" in primary[0] else primary[0]
    scheme = parts.scheme.removesuffix("+sentinel")
    database = parts.path.strip("/").partition("/")[2] or "0"
    # A client that does not ask the Sentinels does not need their password.
    query = [pair for pair in parse_qsl(parts.query) if not pair[0].startswith("sentinel_")]
    return f"{scheme}://{credentials}{at}{host}:{primary[1]}/{database}?{urlencode(query)}"


@dataclass(frozen=True)
class ServerAddress:
    """Address for connections that only pass bytes on.

    It is ``host`` and ``port``, or the Unix socket ``path``.
    """

    host: str = ""
    port: int = 0
    path: str = ""
    tls: ssl.SSLContext | None = field(default=None, compare=False)


def address_of(url: str) -> ServerAddress:
    """Return the address in a URL; with Sentinel, that of the present primary.

    Raises :class:`StoreError`.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return ServerAddress(path=parts.path)
    tls = _context(url) if parts.scheme.startswith("rediss") else None
    if url.startswith(SCHEMES):
        parsed = SentinelUrl.parse(url)
        with mapped_errors(), _sentinels_of(parsed, **tls_options(url)) as sentinels:
            host, port = sentinels.discover_master(parsed.service)
        return ServerAddress(host, port, tls=tls)
    return ServerAddress(parts.hostname or "localhost", parts.port or SERVER_PORT, tls=tls)


def _context(url: str) -> ssl.SSLContext:
    """Return the TLS configuration that redis-py would use for a URL."""
    tls_options(url)
    query = {name: values[-1] for name, values in parse_qs(urlsplit(url).query).items()}
    try:
        context = ssl.create_default_context()
        if "ssl_ca_certs" in query:
            context.load_verify_locations(query["ssl_ca_certs"])
        if "ssl_certfile" in query:
            context.load_cert_chain(query["ssl_certfile"], query.get("ssl_keyfile"))
    except (OSError, ssl.SSLError) as error:
        raise StoreError(
            f"the certificates in the URL of a store can't be used: {error}"
        ) from error
    context.check_hostname = query.get("ssl_check_hostname", "true").lower() != "false"
    return context
