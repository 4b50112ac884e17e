"""Errors as RFC 9457 problem documents: one table from our error tree to HTTP."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from vcasgd.api.requests import HEADER, SCOPE_KEY
from vcasgd.errors import (
    ApiError,
    CheckpointDamaged,
    Conflict,
    Forbidden,
    NotFound,
    PackageError,
    SpecError,
    StorageUnavailable,
    StoreFull,
    StoreUnavailable,
    Unauthorized,
    VcasgdError,
)
from vcasgd.logging import bound, request_id

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
#: when a client should come back after a 503
RETRY_SECONDS = 1

#: the more special kind comes first; what is not listed is a fault of ours
_KINDS: tuple[tuple[type[VcasgdError], int, str], ...] = (
    (SpecError, 422, "invalid-request"),
    (PackageError, 422, "invalid-package"),
    (Unauthorized, 401, "unauthorized"),
    (Forbidden, 403, "forbidden"),
    (NotFound, 404, "not-found"),
    (Conflict, 409, "conflict"),
    (StoreUnavailable, 503, "store-unavailable"),
    (StoreFull, 503, "store-full"),
    (StorageUnavailable, 503, "storage-unavailable"),
    (CheckpointDamaged, 500, "checkpoint-damaged"),
)
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    503: {"Retry-After": str(RETRY_SECONDS)},
}


class Problem(BaseModel):
    """What went wrong, as RFC 9457 asks: ``type`` is stable, the rest is for people. ``request``
    stands in the log lines that belong to it."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    remedy: str | None = None
    traceback: str | None = None
    request: str | None = None


def problem_response(error: VcasgdError) -> Response:
    status, kind = _classify(error)
    if kind is None and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s: %s", type(error).__name__, error)
        return _internal()
    details = {name: error.details.get(name) for name in ("field", "traceback")}
    return _response(status, kind, error.message, remedy=error.remedy, **details)


def _classify(error: VcasgdError) -> tuple[int, str | None]:
    for known, status, name in _KINDS:
        if isinstance(error, known):
            return status, name
    if isinstance(error, ApiError) and error.status:
        return error.status, None
    return HTTPStatus.INTERNAL_SERVER_ERROR, None


def _response(
    status: int,
    kind: str | None,
    detail: str,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> Response:
    problem = Problem(
        type=f"urn:vcasgd:problem:{kind}" if kind else "about:blank",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        request=request_id(),
        **more,
    )
    return JSONResponse(
        problem.model_dump(exclude_none=True),
        status,
        {**_HEADERS.get(status, {}), **(headers or {})},
        MEDIA_TYPE,
    )


def _internal(headers: Mapping[str, str] | None = None) -> Response:
    """Strangers learn nothing of our insides."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    detail = "something went wrong inside; the API's log says what, with this request's id"
    return _response(status, None, detail, headers)


# -- what others raise ------------------------------------------------------------------------


def request_error(error: RequestValidationError) -> SpecError:
    """What FastAPI found wrong with a request, as ours: names the first wrong field."""
    first = error.errors()[0]
    place, *path = (str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return SpecError("the body is not JSON", field=place)
    field = ".".join(path) or place
    return SpecError(f"{field}: {first['msg']}", field=field)


def install(app: FastAPI) -> None:
    """Every error that a route raises becomes a problem document."""

    @app.exception_handler(VcasgdError)
    async def ours(_: Request, error: VcasgdError) -> Response:
        return problem_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return problem_response(request_error(error))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        match error.status_code:
            case HTTPStatus.NOT_FOUND:
                return problem_response(NotFound(f"there is nothing at {request.url.path}"))
            case HTTPStatus.BAD_REQUEST:
                # FastAPI's word for a body that is not even text
                return problem_response(SpecError("the body can't be read", field="body"))
        return _response(error.status_code, None, error.detail, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        # nobody reads this answer; without it the log would show a fault of ours
        return _response(HTTPStatus.BAD_REQUEST, None, "the connection broke")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, __: Exception) -> Response:
        # the server logs the traceback, and then closes the connection without a word
        name = request.scope.get(SCOPE_KEY, "")
        with bound(request=name):
            return _internal({"Connection": "close", HEADER: name})


# -- the OpenAPI document -----------------------------------------------------------------------

_MEANINGS = {
    401: "The token is missing or wrong, or the session is over.",
    403: "The request carries a session, but does not come from the dashboard.",
    404: "There is no such thing.",
    408: "The body took too long.",
    409: "Not possible in the present state.",
    413: "The body is too large.",
    422: "The request is wrong; `field` names where.",
    500: "Something went wrong inside.",
    503: "The ledger or the object storage does not answer; try again.",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that may answer with these problems."""
    schema = {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}
    return {
        status: {"description": _MEANINGS[status], "content": {MEDIA_TYPE: schema}}
        for status in statuses
    }
