"""Connections to a Redis or Valkey server, with our errors instead of the library's."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.client import Pipeline
from redis.commands.core import Script
from redis.exceptions import NoScriptError
from redis.retry import Retry

from vcasgd.backoff import backoff, jittered
from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsupported,
)
from vcasgd.store import sentinel
from vcasgd.store.replication import REPLICA_SECONDS, Replication
from vcasgd.store.tls import tls_error, tls_options

log = logging.getLogger(__name__)

#: Stream lag, Lua effects without functions and ACL selectors all need version 7.0.
OLDEST_SERVER = (7, 0)

#: An answer that takes longer counts as a lost connection.
ANSWER_SECONDS = 10.0
#: Longest pause of :func:`patiently` between two attempts.
LONGEST_PAUSE_SECONDS = 1.0

_CHECK_THE_URL = "check that it is running, and its URL: a TLS port requires rediss://"

#: The library strips the first word of these answers, so only the class tells them apart.
_DENIED = (
    redis.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.AuthenticationWrongNumberOfArgsError,
    redis.exceptions.NoPermissionError,
)
_TRANSIENT = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
)

#: Read-only commands; all others wait for the replicas.
# fmt: off
_READS = frozenset((
    "ACL", "CLIENT", "CONFIG", "EXISTS", "GET", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN",
    "HMGET", "HVALS", "INFO", "LLEN", "LRANGE", "MEMORY USAGE", "MGET", "PING", "PTTL", "SCAN",
    "SCARD", "SCRIPT EXISTS", "SCRIPT LOAD", "SISMEMBER", "SMEMBERS", "STRLEN", "TIME", "TTL",
    "TYPE", "WAIT", "XINFO STREAM", "XLEN", "XRANGE", "XREAD", "XREVRANGE", "ZCARD", "ZRANGE",
    "ZMSCORE", "ZRANGEBYSCORE", "ZREVRANGE", "ZSCORE",
))
# fmt: on

#: Our own options in a URL, beside those of redis-py.
_OWN_OPTIONS = ("replicas", "replica_timeout")
#: Options that are never shown.
_SECRET_OPTIONS = ("username", "password", "ssl_password", "sentinel_username", "sentinel_password")

Result = TypeVar("Result")


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Translate the exceptions of redis-py into ours.

    ``NoScriptError`` passes: the library handles it by loading the script.
    """
    try:
        yield
    except NoScriptError:
        raise
    except _DENIED as error:
        raise StoreDenied(f"the store refused: {error}") from error
    except redis.exceptions.OutOfMemoryError as error:
        raise StoreFull("the store is at its memory limit") from error
    except _TRANSIENT as error:
        if (over_tls := tls_error(error)) is not None:
            raise over_tls from error
        raise StoreUnavailable(f"the store does not answer: {error}") from error
    except redis.ResponseError as error:
        raise _from_script(str(error)) from error
    except redis.RedisError as error:
        raise StoreError(f"the store returned an error: {error}") from error


def _from_script(text: str) -> StoreError:
    """Return the error for a text whose first word, in capitals, is from a script or the server."""
    # In a pipeline the library prepends the command to the answer.
    text = text.rpartition(" of pipeline caused error: ")[2]
    if text.startswith("FENCED"):
        return Fenced(text.removeprefix("FENCED "))
    if text.startswith("NOSNAPSHOT"):
        return SnapshotMissing("the tensors server holds no snapshot of this job")
    if text.startswith("STALE"):
        return StoreUnavailable(f"the store has an older state: {text.removeprefix('STALE ')}")
    if text.startswith("NOREPLICAS"):
        return StoreUnavailable(f"the store has no replica: {text}")
    if text.startswith("BUSY"):
        return StoreUnavailable(f"the store is not ready: {text}")
    # Writes are refused after the disk with the append-only file has failed.
    if text.startswith("MISCONF"):
        return StoreUnavailable(f"the store can't write its file: {text}")
    # A script lacks a permission: the text of Valkey, and the text of Redis.
    if "ACL failure in script" in text or text.startswith("The user executing the script"):
        return StoreDenied(f"the store refused: {text}")
    if "command not allowed when used memory" in text:
        return StoreFull("the store is at its memory limit")
    return StoreError(f"the store returned an error: {text}")


def error_of_reply(line: bytes) -> StoreError:
    """Return our error for a server's error line, given without its leading ``-``."""
    text = line.decode(errors="replace")
    word = text.partition(" ")[0]
    if word == "OOM":
        return StoreFull("the store is at its memory limit")
    if word in ("NOPERM", "NOAUTH", "WRONGPASS"):
        return StoreDenied(f"the store refused: {text}")
    if word in ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS"):
        return StoreUnavailable(f"the store is not ready: {text}")
    return _from_script(text)


class _Pipeline(Pipeline):
    """A pipeline that raises our errors. With ``replication``, its writes wait for the replicas."""

    replication: Replication | None = None

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with mapped_errors():
            result: list[Any] = super().execute(raise_on_error)
            return result

    def _execute_pipeline(
        self, connection: Any, commands: list[Any], raise_on_error: bool
    ) -> list[Any]:
        wait = self._wait_after(commands)
        if wait is None:
            plain: list[Any] = super()._execute_pipeline(connection, commands, raise_on_error)
            return plain
        # WAIT goes in the same round trip.
        with_wait = [*commands, (wait, {})]
        results: list[Any] = super()._execute_pipeline(connection, with_wait, raise_on_error)
        self._record_answer(results.pop())
        return results

    def _execute_transaction(
        self, connection: Any, commands: list[Any], raise_on_error: bool
    ) -> list[Any]:
        results: list[Any] = super()._execute_transaction(connection, commands, raise_on_error)
        if wait := self._wait_after(commands):
            # Inside a transaction WAIT would not block.
            connection.send_command(*wait)
            self._record_answer(connection.read_response())
        return results

    def _wait_after(self, commands: list[Any]) -> tuple[str, int, int] | None:
        if self.replication is None or all(args[0] in _READS for args, _ in commands):
            return None
        return self.replication.command()

    def _record_answer(self, acknowledged: Any) -> None:
        assert self.replication is not None
        if isinstance(acknowledged, Exception):
            raise acknowledged
        self.replication.record_answer(acknowledged)


class RedisClient(redis.Redis):
    """A redis-py client that raises our errors.

    ``replication`` is the state of the server's replicas if its URL names any. If ``waits`` is
    True, every write returns after the replicas have acknowledged it.
    """

    replication: Replication | None = None
    waits = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Idle connections of :class:`~vcasgd.store.bulk_transfer.BulkTransfer`.
        self.idle_bulk: deque[Any] = deque()
        #: Bytes of the strings that it has received. Several threads add to the number.
        self.bulk_received = 0
        self._bulk_lock = threading.Lock()

    def count_bulk(self, received: int) -> None:
        """Add to :attr:`bulk_received`."""
        with self._bulk_lock:
            self.bulk_received += received

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with mapped_errors():
            if not self.waits or args[0] in _READS:
                return super().execute_command(*args, **options)
            pipe = self.pipeline()
            pipe.execute_command(*args, **options)
            # In a pipeline, the library would put the whole command into the error's text.
            (result,) = pipe.execute(raise_on_error=False)
            if isinstance(result, Exception):
                raise result
            return result

    def pipeline(self, transaction: bool = False, shard_hint: Any = None) -> _Pipeline:
        pipe = _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        if self.waits:
            pipe.replication = self.replication
        return pipe

    def waiting(self) -> RedisClient:
        """Return a client with the same connections whose writes wait for the replicas, if any."""
        client = type(self)(connection_pool=self.connection_pool)
        client.replication, client.waits = self.replication, self.replication is not None
        return client

    def leads_to_server(self, connection: Any) -> bool:
        """Return True if an idle connection leads to the same server as a new one would."""
        pool: Any = self.connection_pool
        primary = getattr(pool, "master_address", None)  # only Sentinel pools have it
        return primary is None or primary == (connection.host, connection.port)

    @property
    def replicated(self) -> bool:
        """True if the server has replicas and the last write reached them."""
        return self.replication is not None and self.replication.holds

    def script(self, name: str) -> Script:
        """Return ``scripts/<name>.lua``, which is sent by digest and loaded if it is missing."""
        return self.register_script(script_source(name))


@cache
def script_source(name: str) -> str:
    """Return the text of a script, with its ``-- Includes`` lines replaced."""
    text = resources.files("vcasgd.store").joinpath("scripts", f"{name}.lua").read_text()
    return re.sub(
        r"^-- Includes ([\w/]+)\.lua\n",
        lambda line: script_source(line[1]),
        text,
        flags=re.MULTILINE,
    )


def connect(url: str, *, answer_seconds: float = ANSWER_SECONDS, waits: bool = True) -> RedisClient:
    """Return a client, which connects on its first use.

    ``url``: ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or
    ``rediss+sentinel://``. With ``replicas=n`` in it, every write waits for n replicas; if
    ``waits`` is False, only the writes of :meth:`RedisClient.waiting` do. The library's own
    retries are off, because only the caller knows whether a command may be repeated; see
    :func:`patiently`. Raises :class:`StoreError` if the URL is invalid.
    """
    options: dict[str, Any] = {
        "socket_timeout": answer_seconds,
        "socket_connect_timeout": min(answer_seconds, 5.0),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    # A Unix socket has no keep-alive packets.
    if not url.startswith("unix:"):
        options["socket_keepalive"] = True
    try:
        plain, replicas, seconds = _split_own_options(url)
        client, confirm = _client(plain, {**options, **tls_options(plain)})
    except ValueError:
        # The library's message may contain a part of the password.
        raise StoreError(
            "the URL of a store is invalid",
            remedy="write redis://[[user]:password@]host:port[/db], rediss://…, unix://… or "
            "redis+sentinel://[user:password@]host:port[,host:port…]/service[/db]",
        ) from None
    if replicas:
        # Waiting longer than the socket timeout would count as a lost connection.
        client.replication = Replication(replicas, min(seconds, answer_seconds / 2), confirm)
        client.waits = waits
    return client


def _client(url: str, options: dict[str, Any]) -> tuple[RedisClient, Callable[[], None]]:
    """Return a client and a function that raises if its server may no longer be the primary."""
    if url.startswith(sentinel.SCHEMES):
        client: Any
        client, confirm = sentinel.primary_of(
            sentinel.SentinelUrl.parse(url), RedisClient, **options
        )
        return client, confirm
    return RedisClient.from_url(url, **options), lambda: None


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
    """Check that a server is new enough and never evicts keys.

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
            pause = backoff(failures, first_pause, LONGEST_PAUSE_SECONDS)
            if time.monotonic() + pause > deadline or give_up():
                raise
            log.debug("retrying: %s", error)
            time.sleep(jittered(pause))
