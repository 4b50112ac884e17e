"""Servers that are found through Redis Sentinel: who is the primary, and whether it still is.

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
#: Sentinels answer from memory; one that needs longer is asked another time
SENTINEL_SECONDS = 1.0
#: answers of a server that was the primary, or must not act as one any more
_DEPOSED = ("READONLY", "NOREPLICAS", "UNBLOCKED", "MASTERDOWN")


@dataclass(frozen=True)
class SentinelUrl:
    """``options``: what redis-py's connections take, with user, password and database.

    ``repr`` shows none of the passwords.
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
        """Raises :class:`ValueError`, with nothing of the URL in its text."""
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
    """A connection that is given up as soon as its server turns out not to be the primary."""

    def on_connect_check_health(self, check_health: bool = True) -> None:
        super().on_connect_check_health(check_health=check_health)
        # Sentinel's answer may be older than the failover, and a replica answers reads; HELLO
        # says what ROLE does, which is for administrators only
        self.send_command("HELLO", 2)
        said = self.read_response()
        if dict(zip(said[::2], said[1::2], strict=True))[b"role"] != b"master":
            raise redis.ConnectionError("the server is a replica")

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except redis.ResponseError as error:
            if not _deposed(error):
                raise
            # the next use of this connection asks Sentinel anew
            self.disconnect()
            raise redis.ConnectionError(f"the server may not write: {error}") from error


class _ToPrimaryByTls(_ToPrimary, SSLConnection):  # type: ignore[misc]
    pass


def _deposed(error: redis.ResponseError) -> bool:
    kinds = (redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError)
    return isinstance(error, kinds) or str(error).startswith(_DEPOSED)


class _Sentinels(Sentinel):  # type: ignore[misc]
    """Believes the newest of the configurations that a majority of the Sentinels tells.

    The first answer, as the library takes it, may come from the one Sentinel that was cut off
    together with the old primary.
    """

    def discover_master(self, service_name: str) -> tuple[str, int]:
        found, errors = self._asked(service_name)
        if not found:
            names = ", ".join(type(error).__name__ for error in errors)
            # as its cause, for what a refused certificate means is told from that
            raise MasterNotFoundError(
                f"no Sentinel knows a primary of {service_name!r}: {names}"
            ) from errors[-1]
        return max(found)[1]

    def sure_of(self, service_name: str) -> tuple[str, int] | None:
        """The primary in the newest word of a majority; None where less than that answers."""
        found, _ = self._asked(service_name)
        return max(found)[1] if len(found) >= self._majority else None

    @property
    def _majority(self) -> int:
        return len(self.sentinels) // 2 + 1

    def _asked(
        self, service: str
    ) -> tuple[list[tuple[int, tuple[str, int]]], list[redis.RedisError]]:
        """Configuration's epoch and address, from as many as are needed; what others said."""
        found: list[tuple[int, tuple[str, int]]] = []
        errors: list[redis.RedisError] = []
        for sentinel in list(self.sentinels):
            try:
                state = sentinel.sentinel_master(service)
            except redis.RedisError as error:
                errors.append(error)
                # it is asked last from now on, so that a dead one costs its time only once
                self.sentinels.remove(sentinel)
                self.sentinels.append(sentinel)
                continue
            found.append((int(state["config-epoch"]), (str(state["ip"]), int(state["port"]))))
            if len(found) >= self._majority:
                break
        return found, errors


def primary_of(
    url: SentinelUrl, client_class: type[redis.Redis], **options: Any
) -> tuple[redis.Redis, Callable[[], None]]:
    """A client of the service's primary, whoever that is; and a function that raises
    :class:`redis.ConnectionError` where it is not certain that this is still the primary."""
    # options of redis-py's own, for the sentinels as for the server
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
        if sentinels.sure_of(url.service) != pool.master_address:
            pool.disconnect()
            raise redis.ConnectionError("the server may not be the primary any more")

    return client, confirm


def named_primary(url: str) -> tuple[str, int] | None:
    """Host and port of the primary, in the words of a majority of the Sentinels; None where
    less than that answers. ``url``: of the service."""
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
        return sentinels.sure_of(parsed.service)


def address_of(url: str) -> str | None:
    """The URL of the server itself, for those who know nothing of Sentinel; None where nobody
    can say at the moment who the primary is. Other URLs are what they are."""
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
    # their password is nobody's business where nobody asks them
    query = [pair for pair in parse_qsl(parts.query) if not pair[0].startswith("sentinel_")]
    return f"{scheme}://{credentials}{at}{host}:{primary[1]}/{database}?{urlencode(query)}"
