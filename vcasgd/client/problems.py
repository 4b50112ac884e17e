"""What goes wrong between client and API, as our errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from vcasgd.errors import (
    ApiError,
    CheckpointDamaged,
    Conflict,
    NotFound,
    PackageError,
    SpecError,
    Unauthorized,
    VcasgdError,
)

#: the last part of a problem's ``type``
_BY_TYPE: dict[str, type[VcasgdError]] = {
    "invalid-request": SpecError,
    "invalid-package": PackageError,
    "checkpoint-damaged": CheckpointDamaged,
    "unauthorized": Unauthorized,
    "not-found": NotFound,
    "conflict": Conflict,
}
_BY_STATUS: dict[int, type[VcasgdError]] = {401: Unauthorized, 404: NotFound, 409: Conflict}
#: no answer at all, or one that says: later
_LATER = frozenset({0, 502, 503, 504})


def may_work_later(error: ApiError) -> bool:
    """Whether the same request may be answered some time later: the API or something that it
    needs was away."""
    return error.status in _LATER


@contextmanager
def mapped_errors(url: str) -> Iterator[None]:
    """Turns what httpx raises into our own tree."""
    try:
        yield
    except httpx.TransportError as error:
        kind = type(error).__name__
        raise ApiError(
            f"no answer from {url}: {error or kind}",
            remedy="is the stack up? start it with: vcasgd up",
        ) from error
    except (httpx.InvalidURL, httpx.HTTPError) as error:
        raise ApiError(f"{url}: {error}") from error


def raise_for_problem(response: httpx.Response) -> None:
    """Raises the error that a problem document describes; silent after success.

    The body of a streamed response must have been read.
    """
    if response.is_success:
        return
    problem = _document(response)
    status = response.status_code
    # an answer to HEAD, or a page of some proxy, carries no document
    message = str(problem.get("detail") or f"the API answered {status} {response.reason_phrase}")
    details = {"status": status, "problem": problem}
    details |= {name: problem[name] for name in ("field", "traceback") if name in problem}
    remedy = problem.get("remedy")
    raise _kind(status, problem)(message, remedy=remedy and str(remedy), **details)


def _document(response: httpx.Response) -> Mapping[str, Any]:
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _kind(status: int, problem: Mapping[str, Any]) -> type[VcasgdError]:
    name = str(problem.get("type", "")).rpartition(":")[2]
    return _BY_TYPE.get(name) or _BY_STATUS.get(status, ApiError)
