"""Connections to a Redis or Valkey server, with our errors instead of the library's."""

from __future__ import annotations

import logging
import random
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

from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsupported,
)
from vcasgd.store.tls import tls_error, tls_options

log = logging.getLogger(__name__)

#: streams with consumer-visible lag, function-free Lua effects and ACL selectors: all ≥ 7.0
OLDEST_SERVER = (7, 0)

#: an answer that takes longer than this is treated as a lost connection
ANSWER_SECONDS = 10.0

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

#: of a URL
_SECRET_PARAMETERS = ("username", "password", "ssl_password")

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
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with mapped_errors():
            result: list[Any] = super().execute(raise_on_error)
            return result


class Client(redis.Redis):
    """A redis-py client whose every call raises our errors."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: connections that carry bulk and nothing else, while nobody uses them
        self.idle_bulk: deque[Any] = deque()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        with mapped_errors():
            return super().execute_command(*args, **options)

    def pipeline(self, transaction: bool = False, shard_hint: Any = None) -> _Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)

    def script(self, name: str) -> Script:
        """The script ``scripts/<name>.lua``, sent by digest and loaded where it is missing."""
        return self.register_script(script_source(name))


@cache
def script_source(name: str) -> str:
    return resources.files("vcasgd.store").joinpath("scripts", f"{name}.lua").read_text()


def connect(url: str, *, answer_seconds: float = ANSWER_SECONDS) -> Client:
    """A client for ``redis://``, ``rediss://`` or ``unix://``. Connects at its first use.

    The library's own retries are off: a repeated command is only safe where the caller knows
    that it is, and says so with :func:`patiently`.
    """
    # a Unix socket has no packets that would keep it alive
    keepalive = {} if url.startswith("unix:") else {"socket_keepalive": True}
    try:
        client: Client = Client.from_url(
            url,
            socket_timeout=answer_seconds,
            socket_connect_timeout=min(answer_seconds, 5.0),
            **keepalive,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            **tls_options(url),
        )
    except ValueError:
        # the library's message may quote a part of the password
        raise StoreError(
            "the URL of a store can't be used",
            remedy="write redis://[[user]:password@]host:port[/db], rediss://… or unix://…",
        ) from None
    return client


def without_secret(url: str) -> str:
    """The URL as it may be shown: no user, no password."""
    parts = urlsplit(url)
    shown = [pair for pair in parse_qsl(parts.query) if pair[0] not in _SECRET_PARAMETERS]
    netloc = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=netloc, query=urlencode(shown)))


def check_server(client: Client, role: str) -> None:
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
    pause = first_pause
    while True:
        try:
            return call()
        except (StoreUnavailable, StoreFull) as error:
            if time.monotonic() + pause > deadline or give_up():
                raise
            log.debug("trying again: %s", error)
            # jitter, so that a returning server isn't met by the whole fleet at once
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, 1.0)
