"""Errors of servers and of the client library, as vcasgd's own errors."""

from __future__ import annotations

import ssl
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
