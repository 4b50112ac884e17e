"""Errors of servers and of the client library, as vcasgd's own errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.exceptions import NoScriptError

from vcasgd.errors import (
    Fenced,
    SnapshotMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from vcasgd.store.tls import tls_error

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
