"""Errors of requests to the API, as vcasgd's own errors."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from vcasgd.errors import ApiError, Conflict, Forbidden, NotFound, Unauthorized, VcasgdError
from vcasgd.fleet.providers.local.machine import is_locked
from vcasgd.schemas.service import PROBLEMS

#: Error classes by the last part of a problem's ``type``. What may work later is an `ApiError`.
_BY_TYPE = {name: error_class for name, error_class, status in PROBLEMS if status not in (503, 507)}
#: For answers without a document.
_BY_STATUS: dict[int, type[VcasgdError]] = {
    error_class.default_status: error_class
    for error_class in (Unauthorized, Forbidden, NotFound, Conflict)
}
#: Status of a request that was not sent, because the API's certificate is not trusted.
UNTRUSTED = 495
#: Statuses that ask clients to retry; 0 is the status of a request without a response.
_TEMPORARY = frozenset({0, 429, 502, 503, 504})


def may_work_later(error: ApiError) -> bool:
    """Return True if the same request may succeed later.

    This is the case if the API, or a service that it uses, was unavailable or too busy.
    """
    return error.status in _TEMPORARY


def was_busy(error: ApiError) -> bool:
    """Return True if the API has not seen the request, and takes it soon.

    Too many are in progress, or the stack on this machine starts its API again.
    """
    return error.status == HTTPStatus.TOO_MANY_REQUESTS or "restarts" in error.details


def _refused_certificate(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def mapped_errors(url: str, home: Path | None = None) -> Iterator[None]:
    """Raise errors of httpx as :class:`ApiError`. ``home``: that of the stack, if it is local."""
    try:
        yield
    except httpx.TransportError as error:
        if (refused := _refused_certificate(error)) is not None:
            raise ApiError(
                f"the certificate of {url} is not trusted: {refused.verify_message}",
                remedy="set VCASGD_CA_FILE to a file with it, and use the name or address in it",
                status=UNTRUSTED,
            ) from error
        kind = type(error).__name__
        remedy, details = "check the URL, tunnel, and firewall", {}
        if home and is_locked(home / "stack.lock"):
            remedy = "the stack starts its API again: try again, or see vcasgd status"
            details = {"restarts": True} if isinstance(error, httpx.ConnectError) else {}
        elif not url.lower().startswith("https:"):  # The API of a local stack has no TLS.
            remedy = f"start a local stack with vcasgd up, or {remedy}"
        message = f"no answer from {url}: {error or kind}"
        raise ApiError(message, remedy=remedy, **details) from error
    except (httpx.InvalidURL, httpx.HTTPError) as error:
        raise ApiError(f"{url}: {error}") from error


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the error that a response describes, unless it is successful.

    Read the body of a streamed response first.
    """
    if response.is_success:
        return
    problem = _document(response)
    status = response.status_code
    # responses to HEAD and error pages of proxies contain no document
    message = str(problem.get("detail") or f"the API answered {status} {response.reason_phrase}")
    details = {"status": status, "problem": problem}
    details |= {
        name: problem[name] for name in ("field", "traceback", "version") if name in problem
    }
    remedy = problem.get("remedy")
    raise _error_class(status, problem)(message, remedy=remedy and str(remedy), **details)


def _document(response: httpx.Response) -> Mapping[str, Any]:
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _error_class(status: int, problem: Mapping[str, Any]) -> type[VcasgdError]:
    name = str(problem.get("type", "")).rpartition(":")[2]
    return _BY_TYPE.get(name) or _BY_STATUS.get(status, ApiError)
