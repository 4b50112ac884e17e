"""Discovery of the primary through Redis Sentinel, and checks that it still is the primary.

``redis+sentinel://[user:password@]host:port[,host:port…]/service[/db][?options]``
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import SSLConnection, parse_url
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelManagedConnection

from vcasgd.store.tls import tls_options

SCHEMES = ("redis+sentinel", "rediss+sentinel")
SENTINEL_PORT = 26379
#: Sentinels answer from memory; one that needs longer is skipped.
SENTINEL_SECONDS = 1.0
#: Answers of a server that no longer is the primary, or must not act as one.
_DEPOSED = ("READONLY", "NOREPLICAS", "UNBLOCKED", "MASTERDOWN")


@dataclass(frozen=True)
class SentinelUrl:
    """A parsed URL. ``options`` are arguments of redis-py's connections, with the credentials.

    ``repr`` shows no password.
    """

    hosts: tuple[tuple[str, int], ...]
    service: str
    tls: bool
    options: dict[str, Any]
    sentinel_options: dict[str, Any]

    def __repr__(self) -> str:
        return f"SentinelUrl(hosts={self.hosts}, service={self.service!r}, tls={self.tls})"

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


class _ToPrimary(SentinelManagedConnection):  # type: ignore[misc]  # the library has no types
    """A connection that closes as soon as its server turns out not to be the primary."""

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health=check_health)
        # Sentinel's answer may be older than the failover, and a replica answers reads. HELLO
        # contains the role; the ROLE command requires an administrator.
        self.send_command("HELLO", 2)
        answer = self.read_response()
        if dict(zip(answer[::2], answer[1::2], strict=True))[b"role"] != b"master":
            raise redis.ConnectionError("the server is a replica")

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as error:
            if not _deposed(error):
                raise
            # The next use of this connection asks Sentinel again.
            self.disconnect()
            raise redis.ConnectionError(
                f"the server is not a primary that accepts writes: {error}"
            ) from error


class _ToPrimaryByTls(_ToPrimary, SSLConnection):  # type: ignore[misc]
    pass


def _deposed(error: redis.ResponseError) -> bool:
    kinds = (redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError)
    return isinstance(error, kinds) or str(error).startswith(_DEPOSED)


class _Sentinels(Sentinel):  # type: ignore[misc]
    """Sentinels of which a majority is asked; the newest configuration wins.

    The library uses the first answer, which may come from the one Sentinel that was cut off
    together with the old primary.
    """

    def discover_master(self, service_name: str) -> tuple[str, int]:
        addresses, errors = self._ask(service_name)
        if not addresses:
            names = ", ".join(type(error).__name__ for error in errors)
            # The cause shows whether a certificate was refused.
            raise MasterNotFoundError(
                f"no Sentinel knows a primary of {service_name!r}: {names}"
            ) from errors[-1]
        return max(addresses)[1]

    def confirmed_primary(self, service_name: str) -> tuple[str, int] | None:
        """Return the primary in a majority's newest configuration; None without a majority."""
        addresses, _ = self._ask(service_name)
        return max(addresses)[1] if len(addresses) >= self._majority else None

    @property
    def _majority(self) -> int:
        return len(self.sentinels) // 2 + 1

    def _ask(
        self, service: str
    ) -> tuple[list[tuple[int, tuple[str, int]]], list[redis.RedisError]]:
        """Return epoch and address from a majority, if it answers, and the errors of the others."""
        addresses: list[tuple[int, tuple[str, int]]] = []
        errors: list[redis.RedisError] = []
        for sentinel in list(self.sentinels):
            try:
                state = sentinel.sentinel_master(service)
            except redis.RedisError as error:
                errors.append(error)
                # Ask it last from now on, so that a dead one costs its timeout only once.
                self.sentinels.remove(sentinel)
                self.sentinels.append(sentinel)
                continue
            addresses.append((int(state["config-epoch"]), (str(state["ip"]), int(state["port"]))))
            if len(addresses) >= self._majority:
                break
        return addresses, errors


def primary_of(
    url: SentinelUrl, client_class: type[redis.Redis], **options: Any
) -> tuple[redis.Redis, Callable[[], None]]:
    """Return a client of a service's current primary, and a function that checks it.

    The function raises :class:`redis.ConnectionError` unless a majority of the Sentinels
    confirms that the client's server is still the primary.
    """
    # The Sentinels get the same redis-py options as the server.
    short = min(SENTINEL_SECONDS, options["socket_timeout"])
    sentinels = _Sentinels(
        url.hosts,
        sentinel_kwargs={
            **{name: each for name, each in options.items() if name.startswith("ssl_")},
            **url.sentinel_options,
            **{name: options[name] for name in ("retry", "protocol", "socket_keepalive")},
            "socket_timeout": short,
            "socket_connect_timeout": short,
        },
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
            pool.disconnect()
            raise redis.ConnectionError("the server may no longer be the primary")

    return client, confirm


def named_primary(url: str) -> tuple[str, int] | None:
    """Return host and port of the primary of a service's URL; None without a majority."""
    parsed = SentinelUrl.parse(url)
    sentinels = _Sentinels(
        parsed.hosts,
        sentinel_kwargs={
            **tls_options(url),
            **parsed.sentinel_options,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": SENTINEL_SECONDS,
            "socket_connect_timeout": SENTINEL_SECONDS,
        },
    )
    with sentinels:
        return sentinels.confirmed_primary(parsed.service)


def address_of(url: str) -> str | None:
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
