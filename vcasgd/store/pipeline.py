"""Pipelines that raise our errors, wait for replicas, and may exceed a server's memory limit.

:func:`mapped_errors` maps the errors of servers and of the client library.

The limit is for what grows: new jobs and their histories, models and updates. A job that runs needs
a bounded amount more for its leases, machines, and reports, and stopping it would free nothing. On
a tensors server, a parameter server that writes nothing makes no room. So scripts of the platform
have the flag ``allow-oom``, and plain commands run in such a script. Transactions that write are
such a script, too.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import redis
from redis.client import Pipeline
from redis.exceptions import NoScriptError, OutOfMemoryError

from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

if TYPE_CHECKING:
    from vcasgd.store.connection import RedisClient

#: Share of a server's memory limit from which on it counts as full: new jobs are refused, so that
#: those that run have the rest.
FULL_SHARE = 0.95

#: Read-only commands; all others wait for the replicas.
# fmt: off
READS = frozenset((
    "ACL", "CLIENT", "CONFIG", "EXISTS", "GET", "HEXISTS", "HGET", "HGETALL", "HKEYS", "HLEN",
    "HMGET", "HVALS", "INFO", "LLEN", "LRANGE", "MEMORY USAGE", "MGET", "PING", "PTTL", "SCAN",
    "SCARD", "SCRIPT EXISTS", "SCRIPT LOAD", "SISMEMBER", "SMEMBERS", "SRANDMEMBER", "STRLEN",
    "TIME", "TTL", "TYPE", "WAIT", "XINFO STREAM", "XLEN", "XRANGE", "XREAD", "XREVRANGE", "ZCARD",
    "ZMSCORE", "ZRANGE", "ZRANGEBYSCORE", "ZREVRANGE", "ZREVRANK", "ZSCORE",
))
# fmt: on

#: Runs commands, each given by its number of arguments and these. Returns the answers. Lua can't
#: unpack more than some thousand arguments, so a longer command, which is variadic after its key
#: (such as HSET), is run in parts.
_SCRIPT = """local answers, at = {}, 1
while at <= #ARGV do
  local last, answer = at + tonumber(ARGV[at]), nil
  if last - at <= 4000 then
    answer = redis.call(unpack(ARGV, at + 1, last))
  else
    for first = at + 3, last, 2000 do
      local part = math.min(first + 1999, last)
      answer = redis.call(ARGV[at + 1], ARGV[at + 2], unpack(ARGV, first, part))
    end
  end
  answers[#answers + 1] = answer
  at = last + 1
end
return answers"""

#: Commands that add to a job's history, and scripts, which have a flag of their own.
_REFUSED = frozenset(("XADD", "EVALSHA", "EVAL"))

#: A command of a pipeline, with the library's options.
Command = tuple[Sequence[Any], dict[str, Any]]


class StorePipeline(Pipeline):
    """A pipeline that raises our errors.

    Its writes wait for the replicas and exceed the memory limit as those of its client do. A
    transaction that writes is one script.
    """

    def __init__(self, client: RedisClient, transaction: bool) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, None)
        self._replication = client.replication if client.waits else None
        self._over_limit = client.over_limit

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands: list[Command] = list(self.command_stack)
        with mapped_errors():
            if self.transaction and not _only_read(commands):
                results = self._as_script(commands)
            else:
                try:
                    results = self._in_one_trip()
                except OutOfMemoryError:
                    # A server at its limit queues not even the reads of a transaction.
                    results = self._as_script(commands)
                self._repeat_refused(commands, results)
            for result in results if raise_on_error else ():
                if isinstance(result, Exception):
                    raise result
        return results

    def _in_one_trip(self) -> list[Any]:
        """Return the answers, some of which can be errors."""
        wait = None
        if self._replication is not None and not _only_read(self.command_stack):
            wait = self._replication.command()
        if wait is not None:
            self.execute_command(*wait)
        results: list[Any] = super().execute(raise_on_error=False)
        if wait is not None and self._replication is not None:
            acknowledged = results.pop()
            if isinstance(acknowledged, Exception):
                raise acknowledged
            self._replication.record_answer(acknowledged)
        return results

    def _as_script(self, commands: list[Command]) -> list[Any]:
        self.reset()
        self.transaction = False
        self.execute_command(*_as_one(commands, over_limit=self._over_limit))
        (answers,) = self._in_one_trip()
        if isinstance(answers, Exception):
            raise answers
        return _converted(commands, answers, self.response_callbacks)

    def _repeat_refused(self, commands: list[Command], results: list[Any]) -> None:
        """Repeat commands that the server refused at its limit, if they may exceed it."""
        refused = [
            at
            for at, ((command, _), answer) in enumerate(zip(commands, results, strict=True))
            if self._over_limit and isinstance(answer, OutOfMemoryError) and may_exceed(command)
        ]
        if refused:
            again = self._as_script([commands[at] for at in refused])
            for at, result in zip(refused, again, strict=True):
                results[at] = result


def _only_read(commands: list[Command]) -> bool:
    return all(args[0] in READS for args, _ in commands)


def may_exceed(command: Sequence[Any]) -> bool:
    """Return True if a command may continue at the memory limit."""
    return command[0] not in _REFUSED


def _as_one(commands: Iterable[Command], *, over_limit: bool) -> tuple[Any, ...]:
    """Return a command that runs others atomically, over the memory limit if they may."""
    arguments: list[Any] = []
    for (name, *rest), _ in commands:
        # redis-py has commands of two words
        words = [*str(name).split(), *rest]
        arguments += [len(words), *words]
        over_limit = over_limit and may_exceed((name,))
    return ("EVAL", f"#!lua flags=allow-oom\n{_SCRIPT}" if over_limit else _SCRIPT, 0, *arguments)


def _converted(
    commands: Iterable[Command],
    answers: Iterable[Any],
    callbacks: Mapping[str, Callable[..., Any]],
) -> list[Any]:
    """Return the answers to :func:`_as_one` as the library returns those of the commands."""
    results = []
    for (command, options), answer in zip(commands, answers, strict=True):
        # the library adds the keys for its cache
        own = {name: value for name, value in options.items() if name != "keys"}
        convert = callbacks.get(command[0])
        results.append(convert(answer, **own) if convert else answer)
    return results


#: Start of the standard library's error text if no answer to a handshake arrived.
_HANDSHAKE_TIMED_OUT = "_ssl.c"
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
    redis.exceptions.TryAgainError,
    redis.exceptions.ClusterDownError,
)


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
    except redis.exceptions.ReadOnlyError as error:
        raise StoreUnavailable(f"the store takes no writes: {error}") from error
    except _TRANSIENT as error:
        if (over_tls := _tls_error(error)) is not None:
            raise over_tls from error
        raise StoreUnavailable(f"the store does not answer: {error}") from error
    except redis.ResponseError as error:
        raise _from_script(str(error)) from error
    except redis.RedisError as error:
        raise StoreError(f"the store returned an error: {error}") from error


def _from_script(text: str) -> StoreError:
    """Return the error for a text whose first word, in capitals, is from a script or the server."""
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
    if text.startswith("FULL") or "command not allowed when used memory" in text:
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


def _tls_error(error: BaseException) -> StoreError | None:
    """Return our error for a connection that failed because of TLS; None for other reasons."""
    cause = _tls_cause(error)
    if cause is None:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return StoreDenied(
            f"the store's certificate is not accepted: {cause.verify_message}",
            remedy="name its authority in the URL, ?ssl_ca_certs=FILE, and a host that it covers",
        )
    if isinstance(cause, TimeoutError):
        return StoreUnavailable(
            "the store does not answer: no TLS handshake",
            remedy="if this port does not use TLS, write redis://",
        )
    if isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return StoreUnavailable(
            "the store does not answer: it closed the TLS connection",
            remedy="if it requires client certificates, add ?ssl_certfile=FILE&ssl_keyfile=FILE",
        )
    return StoreDenied(
        f"no TLS connection to the store: {cause.reason or cause}",
        remedy="check ssl_ca_certs, ssl_certfile and ssl_keyfile in its URL, and its port",
    )


def _tls_cause(error: BaseException | None) -> ssl.SSLError | TimeoutError | None:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return error
        if isinstance(error, TimeoutError) and str(error).startswith(_HANDSHAKE_TIMED_OUT):
            return error
        error = error.__cause__ or error.__context__
    return None


log = logging.getLogger(__name__)

#: Seconds that a write waits for its replica before the store counts as unreplicated.
REPLICA_SECONDS = 5.0
#: Seconds between two probes of whether the replica is back.
PROBE_SECONDS = 1.0
#: Timeout of a probe. It can be short, because the replica had the time since the last one.
PROBE_WAIT_MS = 20


class Replication:
    """State of a server's replicas, as one client sees it.

    Redis replicates asynchronously. ``WAIT n ms`` on the connection that wrote returns how many
    replicas have that write. The count may be too small, and is checked here. Writes continue even
    then: after a bounded time the store counts as *unreplicated*, which is logged, and no write
    waits until the replica is back. docs/guarantees.md describes the consequences.

    ``replicas``: how many must have a write, at least 1. ``seconds``: how long to wait for
    them. ``confirm`` is called before a count that is too small is accepted. It raises if the
    server is no longer the primary, because the write will then be discarded.
    """

    def __init__(self, replicas: int, seconds: float, confirm: Callable[[], None]) -> None:
        self._replicas = replicas
        self._seconds = seconds
        self._confirm = confirm
        self._probed_at = 0.0
        #: Unix time in seconds; None while acknowledged writes are on the replicas.
        self.unreplicated_since: float | None = None

    @property
    def holds(self) -> bool:
        """True if acknowledged writes are on the replicas."""
        return self.unreplicated_since is None

    def command(self) -> tuple[str, int, int] | None:
        """Return the command to send after a write, or None if waiting is pointless now."""
        if self.holds:
            return ("WAIT", self._replicas, int(self._seconds * 1000))
        if time.monotonic() - self._probed_at < PROBE_SECONDS:
            return None
        return ("WAIT", self._replicas, PROBE_WAIT_MS)

    def record_answer(self, acknowledged: int) -> None:
        """Process the answer to :meth:`command`. Raises as ``confirm`` does."""
        self._probed_at = time.monotonic()
        if acknowledged >= self._replicas:
            if not self.holds:
                log.warning("replicated again")
            self.unreplicated_since = None
            return
        self._confirm()
        if self.holds:
            log.warning("unreplicated: %d of %d replicas answered", acknowledged, self._replicas)
            self.unreplicated_since = time.time()
