"""Connections to a Redis or Valkey server, with our errors instead of the library's."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.commands.core import Script
from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError
from redis.retry import Retry

from vcasgd import limits
from vcasgd.backoff import backoff, jittered
from vcasgd.errors import StoreError, StoreFull, StoreUnavailable, StoreUnsupported
from vcasgd.store import sentinel
from vcasgd.store.pipeline import (
    READS,
    REPLICA_SECONDS,
    Replication,
    StorePipeline,
    mapped_errors,
    may_exceed,
)

log = logging.getLogger(__name__)

#: Stream lag, Lua effects without functions and ACL selectors all need version 7.0.
OLDEST_SERVER = (7, 0)

#: An answer that takes longer counts as a lost connection.
ANSWER_SECONDS = 10.0
#: Longest pause of :func:`patiently` between two attempts.
MAX_PAUSE_SECONDS = 1.0

_CHECK_THE_URL = "check that it is running, and its URL: a TLS port requires rediss://"

#: Our own options in a URL, beside those of redis-py.
_OWN_OPTIONS = ("replicas", "replica_timeout")
#: Options that are never shown.
_SECRET_OPTIONS = ("username", "password", "ssl_password", "sentinel_username", "sentinel_password")

Result = TypeVar("Result")


class RedisClient(redis.Redis):
    """A redis-py client that raises our errors.

    ``replication`` is the state of the server's replicas if its URL names any. If ``waits`` is
    True, every write returns after the replicas have acknowledged it. If ``over_limit`` is True,
    writes other than those to histories continue at the server's memory limit.
    """

    replication: Replication | None = None
    waits = False
    over_limit = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Bytes of the strings that :class:`~vcasgd.store.bulk_transfer.BulkTransfer` has received.
        #: Several threads add to the number.
        self.bulk_received = 0
        self._bulk_lock = threading.Lock()

    def count_bulk(self, received: int) -> None:
        """Add to :attr:`bulk_received`."""
        with self._bulk_lock:
            self.bulk_received += received

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with mapped_errors():
            if not self.waits or args[0] in READS:
                try:
                    return super().execute_command(*args, **options)
                except OutOfMemoryError:
                    if not self.over_limit or not may_exceed(args):
                        raise
            pipe = self.pipeline()
            pipe.execute_command(*args, **options)
            return pipe.execute()[0]

    def pipeline(self, transaction: bool = False, shard_hint: Any = None) -> StorePipeline:  # noqa: ARG002
        return StorePipeline(self, transaction)

    def check_writable(self) -> None:
        """Raise :class:`StoreUnavailable` if the server takes no writes. This changes nothing."""
        with mapped_errors():
            super().execute_command("DEL", "vcasgd:no-such-key")

    def now(self) -> float:
        """Return the server's time, in Unix seconds."""
        seconds, microseconds = self.time()
        return float(seconds + microseconds / 1e6)

    def of_each(self, command: str, keys: Iterable[str], *arguments: str) -> list[Any]:
        """Run a command with each of several keys, in one round trip, and return the answers."""
        with self.pipeline() as pipe:
            for key in keys:
                pipe.execute_command(command, key, *arguments)
            answers: list[Any] = pipe.execute()
        return answers

    def waiting(self) -> RedisClient:
        """Return a client with the same connections whose writes wait for the replicas, if any."""
        client = type(self)(connection_pool=self.connection_pool)
        client.replication, client.waits = self.replication, self.replication is not None
        client.over_limit = self.over_limit
        return client

    @property
    def replicated(self) -> bool:
        """True if the server has replicas and the last write reached them."""
        return self.replication is not None and self.replication.holds

    def script(self, name: str) -> Script:
        """Return ``scripts/<name>.lua``, which is sent by digest and loaded if it is missing."""
        return _Script(self, script_source(name))


class _Script(Script):
    """A script whose loss counts as an outage, however often the server restarts."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            return super().__call__(*args, **options)
        except NoScriptError as error:
            raise StoreUnavailable("the store restarted after it had loaded a script") from error


@cache
def script_source(name: str) -> str:
    """Return the text of a script.

    ``-- Includes`` lines are replaced by other scripts, and ``-- Limits`` lines by constants of
    :mod:`vcasgd.limits`.
    """
    text = resources.files("vcasgd.store").joinpath("scripts", f"{name}.lua").read_text()
    text = re.sub(r"^-- Limits (.+)\n", _constants, text, flags=re.MULTILINE)
    return re.sub(
        r"^-- Includes ([\w/]+)\.lua\n",
        lambda line: script_source(line[1]),
        text,
        flags=re.MULTILINE,
    )


def _constants(line: re.Match[str]) -> str:
    names = line[1].split()
    return f"local {', '.join(names)} = {', '.join(str(getattr(limits, each)) for each in names)}\n"


def connect(
    url: str,
    *,
    answer_seconds: float = ANSWER_SECONDS,
    waits: bool = True,
    over_limit: bool = False,
    fence: Callable[[Any], None] | None = None,
) -> RedisClient:
    """Return a client, which connects on its first use.

    ``url``: ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or
    ``rediss+sentinel://``. With ``replicas=n`` in it, every write waits for n replicas; if
    ``waits`` is False, only the writes of :meth:`RedisClient.waiting` do. With ``over_limit``,
    writes continue at the memory limit; see :mod:`vcasgd.store.pipeline`. Only the platform uses
    it: the server closes other connections first if all together take too much of its memory.
    ``fence`` is called with each new connection, and raises an error of redis-py to refuse it. The
    library's own retries are off, because only the caller knows whether a command may be repeated;
    see :func:`patiently`. Raises :class:`StoreError` if the URL is invalid.
    """
    options: dict[str, Any] = {
        "socket_timeout": answer_seconds,
        "socket_connect_timeout": min(answer_seconds, 5.0),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    through_sentinel = url.startswith(sentinel.SCHEMES)
    hooks = (
        sentinel.expect_primary if through_sentinel else None,
        _keep if over_limit else None,
        fence,
    )
    if any(hooks):

        def on_connect(connection: Any) -> None:
            connection.on_connect()
            for hook in filter(None, hooks):
                hook(connection)

        options["redis_connect_func"] = on_connect
    # A Unix socket has no keep-alive packets.
    if not url.startswith("unix:"):
        options["socket_keepalive"] = True
    try:
        plain, replicas, seconds = _split_own_options(url)
        options |= sentinel.tls_options(plain)
        client: RedisClient
        if through_sentinel:
            parsed = sentinel.SentinelUrl.parse(plain)
            client, confirm = sentinel.primary_of(parsed, RedisClient, **options)
        else:
            # Without Sentinel, there is no way to check which server is the primary.
            client, confirm = RedisClient.from_url(plain, **options), lambda: None
    except ValueError:
        # The library's message may contain a part of the password.
        raise StoreError(
            "the URL of a store is invalid",
            remedy="write redis://[[user]:password@]host:port[/db], rediss://…, unix://… or "
            "redis+sentinel://[user:password@]host:port[,host:port…]/service[/db]",
        ) from None
    client.over_limit = over_limit
    if replicas:
        # Waiting longer than the socket timeout would count as a lost connection.
        client.replication = Replication(replicas, min(seconds, answer_seconds / 2), confirm)
        client.waits = waits
    return client


def _keep(connection: Any) -> None:
    connection.send_command("CLIENT", "NO-EVICT", "ON")
    # Some services allow no such command.
    with suppress(ResponseError):
        connection.read_response()


def _split_own_options(url: str) -> tuple[str, int, float]:
    """Return the URL for the library, the number of replicas, and the seconds to wait for them."""
    address, _, query = url.partition("?")
    own = dict(parse_qsl(query))
    rest = [pair for pair in parse_qsl(query) if pair[0] not in _OWN_OPTIONS]
    replicas = int(own.get("replicas", 0))
    seconds = float(own.get("replica_timeout", REPLICA_SECONDS))
    if replicas < 0 or not seconds > 0:
        raise ValueError("replicas or replica_timeout is out of range")
    return f"{address}?{urlencode(rest)}" if rest else address, replicas, seconds


def without_secret(url: str) -> str:
    """Return the URL without user and password."""
    parts = urlsplit(url)
    shown = [pair for pair in parse_qsl(parts.query) if pair[0] not in _SECRET_OPTIONS]
    netloc = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(shown)))


def check_server(client: RedisClient, role: str) -> None:
    """Check that a server is new enough and never evicts keys, and the number of its database.

    Raises :class:`StoreUnsupported`, :class:`StoreUnavailable`, :class:`StoreDenied`.
    """
    try:
        info = client.info("server")
    except StoreUnavailable as error:
        raise StoreUnavailable(
            f"{error.message} ({role} server)", remedy=error.remedy or _CHECK_THE_URL
        ) from error
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_SERVER:
        raise StoreUnsupported(
            f"the {role} server is version {version}",
            remedy="use Redis 7 or newer, or Valkey",
        )
    if database := client.connection_pool.connection_kwargs.get("db"):
        raise StoreUnsupported(
            f"the URL of the {role} server names database {database}",
            remedy="name database 0, the only one that workers may use",
        )
    policy = str(client.info("memory").get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise StoreUnsupported(
            f"the {role} server may evict keys (maxmemory-policy {policy})",
            remedy="set maxmemory-policy noeviction",
        )


def patiently(
    call: Callable[[], Result],
    seconds: float,
    *,
    give_up: Callable[[], bool] = lambda: False,
    first_pause: float = 0.02,
) -> Result:
    """Retry a call for at most ``seconds``, with growing pauses of up to a second.

    Use it only for calls that may be repeated. Retries after :class:`StoreUnavailable` and
    :class:`StoreFull` until ``give_up`` returns True, and then raises the last error.
    """
    deadline = time.monotonic() + seconds
    failures = 0
    while True:
        try:
            return call()
        except (StoreUnavailable, StoreFull) as error:
            failures += 1
            pause = backoff(failures, first_pause, MAX_PAUSE_SECONDS)
            if time.monotonic() + pause > deadline or give_up():
                raise
            log.debug("retrying: %s", error)
            time.sleep(jittered(pause))
