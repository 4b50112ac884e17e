"""Errors as RFC 9457 problem documents, with the status of each class of error."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from vcasgd.errors import ApiError, NotFound, SpecError, StoreUnavailable, VcasgdError
from vcasgd.local_files import full_disk
from vcasgd.logging import bound, request_id
from vcasgd.schemas.service import PROBLEMS, Problem
from vcasgd.spec.problems import by_field, expected

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
#: Header with the ID of a request.
HEADER = "X-Request-ID"
#: A browser that guesses types could take text of a worker for a page or a script.
NO_SNIFFING = {"X-Content-Type-Options": "nosniff"}
#: Key of the ID in the ASGI scope, for handlers that run after the log's context has ended.
SCOPE_KEY = "vcasgd.request"
FREE_SPACE = "free space on it; the stack then continues by itself"
#: Seconds after which a client should retry after a 429 or a 503.
RETRY_SECONDS = 1

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": str(RETRY_SECONDS)},
    503: {"Retry-After": str(RETRY_SECONDS)},
}


def problem_response(error: VcasgdError) -> Response:
    """Return the problem document for an error. Internal errors are logged and not revealed."""
    status, kind = _classify(error)
    if kind is None and status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("%s: %s", type(error).__name__, error)
        return _internal()
    details = {name: error.details.get(name) for name in ("field", "traceback", "version")}
    return _response(status, kind, error.message, remedy=error.remedy, **details)


def _classify(error: VcasgdError) -> tuple[int, str | None]:
    for name, error_class, status in PROBLEMS:
        if isinstance(error, error_class):
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
    """Return the response for an internal error, without its details."""
    status = HTTPStatus.INTERNAL_SERVER_ERROR
    detail = "internal error; see the API's log for this request's ID"
    return _response(status, None, detail, headers)


# -- handlers ---------------------------------------------------------------------------------


def request_error(error: RequestValidationError) -> SpecError:
    """Return FastAPI's validation error as a :class:`SpecError` for the first wrong field."""
    first = by_field(error.errors())[0]
    source, *path = (str(part) for part in first["loc"])
    if first["type"] == "json_invalid" or isinstance(first["input"], bytes):
        remedy = "send JSON, with the header Content-Type: application/json"
        return SpecError("the body is not JSON", remedy=remedy, field=source)
    if source != "body":
        # The rest names the alternatives of a parameter.
        del path[1:]
    field = ".".join(path) or source
    return SpecError(f"{field}: {expected(first)}", field=field)


def install(app: FastAPI) -> None:
    """Add handlers that turn all errors of routes into problem documents."""

    @app.exception_handler(VcasgdError)
    async def ours(request: Request, error: VcasgdError) -> Response:
        if isinstance(error, StoreUnavailable):
            # An embedded server ends on a full disk, and says no more than that it is away.
            home = request.app.state.services.settings.home_path
            if why := await to_thread.run_sync(full_disk, home):
                error = StoreUnavailable(f"{why}; {error.message}", remedy=FREE_SPACE)
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
                # FastAPI raises this for a body that is not text
                return problem_response(SpecError("the body can't be read", field="body"))
        return _response(error.status_code, None, error.detail, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        # the client has gone; without this handler, the log would show an internal error
        return _response(HTTPStatus.BAD_REQUEST, None, "the client disconnected")

    @app.exception_handler(Exception)
    async def unexpected(request: Request, __: Exception) -> Response:
        # the server logs the traceback and closes the connection
        name = request.scope.get(SCOPE_KEY, "")
        with bound(request=name):
            return _internal({"Connection": "close", HEADER: name, **NO_SNIFFING})


# -- the OpenAPI document -----------------------------------------------------------------------

_MEANINGS = {
    401: "The token is missing, wrong, revoked, or expired, or the sign-in has ended.",
    403: "The token's scope or its limit for uploads is not sufficient, the job belongs to another "
    "user, or the request has a cookie of a sign-in, but the dashboard did not send it.",
    404: "The resource does not exist.",
    408: "The body did not arrive in time.",
    409: "The current state does not allow the request.",
    413: "The body is too large.",
    422: "The request is invalid. `field` names the wrong field.",
    429: "The token has too many requests or streams in progress. Try again.",
    500: "Internal error.",
    503: "The ledger or the object storage is unavailable, or too many requests are in progress. "
    "Try again.",
    507: "The ledger is at its memory limit and accepts no new jobs. Running jobs continue.",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route that may return problems with these statuses.

    A route that limits the size of its body limits its time too.
    """
    if 413 in statuses and 408 not in statuses:
        statuses = (408, *statuses)
    schema = {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}
    return {
        status: {"description": _MEANINGS[status], "content": {MEDIA_TYPE: schema}}
        for status in statuses
    }
