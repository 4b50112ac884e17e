"""Connections to a Redis or Valkey server, with our errors instead of the library's."""

from __future__ import annotations

import logging
import re
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

#: streams with consumer-visible lag, function-free Lua effects and ACL selectors: all ≥ 7.0
OLDEST_SERVER = (7, 0)

#: an answer that takes longer than this is treated as a lost connection
ANSWER_SECONDS = 10.0
#: Longest pause of :func:`patiently` between two attempts.
LONGEST_PAUSE_SECONDS = 1.0

_CHECK_THE_URL = "check that it is up, and its URL: a port that speaks TLS wants rediss://"

#: the library takes the first word off these answers, so their text does not tell them apart
_DENIED = (
    redis.AuthenticationError,
    redis.exceptions.AuthorizationError,
    redis.exceptions.AuthenticationWrongNumberOfArgsError,
    redis.exceptions.NoPermissionError,
)
_PASSING = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
)

#: commands of ours that change nothing; whatever is not here waits for the replicas
# fmt: off
_READS = frozenset((
    "ACL", "CLIENT", "CONFIG", "EXISTS", "GET", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN",
    "HMGET", "HVALS", "INFO", "LLEN", "LRANGE", "MEMORY", "MGET", "PING", "PTTL", "SCAN",
    "SCARD", "SCRIPT EXISTS", "SCRIPT LOAD", "SISMEMBER", "SMEMBERS", "STRLEN", "TIME", "TTL",
    "TYPE", "WAIT", "XINFO STREAM", "XLEN", "XRANGE", "XREAD", "XREVRANGE", "ZCARD", "ZRANGE",
    "ZRANGEBYSCORE", "ZREVRANGE", "ZSCORE",
))
# fmt: on

#: what a URL may say beside what redis-py knows
_OWN_OPTIONS = ("replicas", "replica_timeout")
#: in a query; never shown
_SECRET_OPTIONS = ("username", "password", "ssl_password", "sentinel_username", "sentinel_password")

Result = TypeVar("Result")


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Turns what redis-py raises into our own tree.

    ``NoScriptError`` passes: the library answers it itself by loading the script.
    """
    try:
        yield
    except NoScriptError:
        raise
    except _DENIED as error:
        raise StoreDenied(f"the store refused: {error}") from error
    except redis.exceptions.OutOfMemoryError as error:
        raise StoreFull("the store is at its memory limit") from error
    except _PASSING as error:
        if (over_tls := tls_error(error)) is not None:
            raise over_tls from error
        raise StoreUnavailable(f"the store does not answer: {error}") from error
    except redis.ResponseError as error:
        raise _from_script(str(error)) from error
    except redis.RedisError as error:
        raise StoreError(f"the store answered with an error: {error}") from error


def _from_script(text: str) -> StoreError:
    """Our scripts signal with a first word in capitals; the server has such words too."""
    # in a pipeline the library puts the command before the answer
    text = text.rpartition(" of pipeline caused error: ")[2]
    if text.startswith("FENCED"):
        return Fenced(text.removeprefix("FENCED "))
    if text.startswith("NOSNAPSHOT"):
        return SnapshotMissing("the tensors server holds no snapshot of this job")
    if text.startswith("STALE"):
        return StoreUnavailable(f"the store went back in time: {text.removeprefix('STALE ')}")
    if text.startswith("NOREPLICAS"):
        return StoreUnavailable(f"the store has no replica: {text}")
    if text.startswith("BUSY"):
        return StoreUnavailable(f"the store is not ready: {text}")
    # a write that is refused because the disk under the append-only file failed
    if text.startswith("MISCONF"):
        return StoreUnavailable(f"the store can't write its file: {text}")
    # a script was not allowed what it tried: Valkey's words, and those of Redis
    if "ACL failure in script" in text or text.startswith("The user executing the script"):
        return StoreDenied(f"the store refused: {text}")
    if "command not allowed when used memory" in text:
        return StoreFull("the store is at its memory limit")
    return StoreError(f"the store answered with an error: {text}")


def error_of_reply(line: bytes) -> StoreError:
    """What an error means that a server answered, given without its leading ``-``."""
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
    """``replication``: where given, what is written waits for the replicas."""

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
        # in the same round trip
        sent = [*commands, (wait, {})]
        results: list[Any] = super()._execute_pipeline(connection, sent, raise_on_error)
        self._heard(results.pop())
        return results

    def _execute_transaction(
        self, connection: Any, commands: list[Any], raise_on_error: bool
    ) -> list[Any]:
        results: list[Any] = super()._execute_transaction(connection, commands, raise_on_error)
        if wait := self._wait_after(commands):
            # inside of a transaction it would not wait
            connection.send_command(*wait)
            self._heard(connection.read_response())
        return results

    def _wait_after(self, commands: list[Any]) -> tuple[str, int, int] | None:
        if self.replication is None or all(args[0] in _READS for args, _ in commands):
            return None
        return self.replication.command()

    def _heard(self, acknowledged: Any) -> None:
        assert self.replication is not None
        if isinstance(acknowledged, Exception):
            raise acknowledged
        self.replication.heard(acknowledged)


class RedisClient(redis.Redis):
    """A redis-py client whose every call raises our errors.

    ``replication``: of a server whose URL says that it has replicas. ``waits``: whether every
    write of this client is acknowledged by them before it returns.
    """

    replication: Replication | None = None
    waits = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: connections that carry bulk and nothing else, while nobody uses them
        self.idle_bulk: deque[Any] = deque()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with mapped_errors():
            if not self.waits or args[0] in _READS:
                return super().execute_command(*args, **options)
            pipe = self.pipeline()
            pipe.execute_command(*args, **options)
            # raised here, where the library does not put the whole command into its text
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
        """The same connections; every write waits for the replicas, if there are any."""
        client = type(self)(connection_pool=self.connection_pool)
        client.replication, client.waits = self.replication, self.replication is not None
        return client

    def serves(self, connection: Any) -> bool:
        """Whether a connection that was kept leads to where a new one would lead."""
        pool: Any = self.connection_pool
        primary = getattr(pool, "master_address", None)  # of Sentinel's pools only
        return primary is None or primary == (connection.host, connection.port)

    @property
    def replicated(self) -> bool:
        """Whether replicas are expected, and are there as far as is known."""
        return self.replication is not None and self.replication.holds

    def script(self, name: str) -> Script:
        """The script ``scripts/<name>.lua``, sent by digest and loaded where it is missing."""
        return self.register_script(script_source(name))


@cache
def script_source(name: str) -> str:
    text = resources.files("vcasgd.store").joinpath("scripts", f"{name}.lua").read_text()
    return re.sub(
        r"^-- Includes ([\w/]+)\.lua\n",
        lambda line: script_source(line[1]),
        text,
        flags=re.MULTILINE,
    )


def connect(url: str, *, answer_seconds: float = ANSWER_SECONDS, waits: bool = True) -> RedisClient:
    """A client for ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or
    ``rediss+sentinel://``. Connects at its first use.

    With ``replicas=n`` in the URL every write waits for n replicas, unless ``waits`` is False;
    then only :meth:`RedisClient.waiting` does. The library's own retries are off: a repeated
    command
    is only safe where the caller knows that it is, and says so with :func:`patiently`.
    """
    options: dict[str, Any] = {
        "socket_timeout": answer_seconds,
        "socket_connect_timeout": min(answer_seconds, 5.0),
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    # a Unix socket has no packets that would keep it alive
    if not url.startswith("unix:"):
        options["socket_keepalive"] = True
    try:
        plain, replicas, seconds = _without_own(url)
        client, confirm = _client(plain, {**options, **tls_options(plain)})
    except ValueError:
        # the library's message may quote a part of the password
        raise StoreError(
            "the URL of a store can't be used",
            remedy="write redis://[[user]:password@]host:port[/db], rediss://…, unix://… or "
            "redis+sentinel://[user:password@]host:port[,host:port…]/service[/db]",
        ) from None
    if replicas:
        # a reader that waited longer than an answer may take would take the server for dead
        client.replication = Replication(replicas, min(seconds, answer_seconds / 2), confirm)
        client.waits = waits
    return client


def _client(url: str, options: dict[str, Any]) -> tuple[RedisClient, Callable[[], None]]:
    """And what raises where the server may not be the primary any more."""
    if url.startswith(sentinel.SCHEMES):
        client: Any
        client, confirm = sentinel.primary_of(
            sentinel.SentinelUrl.parse(url), RedisClient, **options
        )
        return client, confirm
    return RedisClient.from_url(url, **options), lambda: None


def _without_own(url: str) -> tuple[str, int, float]:
    """The URL as the library takes it, the replicas, and how long to wait for them."""
    address, _, query = url.partition("?")
    own = dict(parse_qsl(query))
    rest = [pair for pair in parse_qsl(query) if pair[0] not in _OWN_OPTIONS]
    replicas = int(own.get("replicas", 0))
    seconds = float(own.get("replica_timeout", REPLICA_SECONDS))
    if replicas < 0 or not seconds > 0:
        raise ValueError("replicas or replica_timeout is out of range")
    return f"{address}?{urlencode(rest)}" if rest else address, replicas, seconds


def without_secret(url: str) -> str:
    """The URL as it may be shown: no user, no password."""
    parts = urlsplit(url)
    shown = [pair for pair in parse_qsl(parts.query) if pair[0] not in _SECRET_OPTIONS]
    netloc = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(shown)))


def check_server(client: RedisClient, role: str) -> None:
    """Refuses a server that is too old, or that may throw keys away.

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
            f"the {role} server may throw away keys (maxmemory-policy {policy})",
            remedy="set maxmemory-policy noeviction",
        )


def patiently(
    call: Callable[[], Result],
    seconds: float,
    *,
    give_up: Callable[[], bool] = lambda: False,
    first_pause: float = 0.02,
) -> Result:
    """Calls until it works, at most ``seconds``, with growing pauses up to a second.

    Only for calls that may be repeated. Tries again after :class:`StoreUnavailable` and
    :class:`StoreFull`; ``give_up`` ends the waiting early. Raises the last error.
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
