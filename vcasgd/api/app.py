"""The application: routes, middleware, and the OpenAPI document."""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware

import vcasgd
from vcasgd.api import STATIC, problems, reference, wheel
from vcasgd.api.access import METRICS, Authentication, Services, scope_of
from vcasgd.api.middleware import BodyLimit, Concurrency, RequestIds
from vcasgd.api.pages import HEADERS, Pages
from vcasgd.api.routes import (
    costs,
    files,
    fleet,
    history,
    jobs,
    joining,
    monitoring,
    shell,
    tokens,
)
from vcasgd.errors import SpecError
from vcasgd.limits import MIN_SECRET
from vcasgd.schemas.service import Problem
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient

PREFIX = "/api/v1"
#: Smallest response that is compressed; smaller ones gain nothing.
GZIP_BYTES = 1000
#: Compression level: listings shrink to a tenth, and higher levels gain little.
GZIP_LEVEL = 4
OPENAPI = f"{PREFIX}/openapi.json"
SIGN_IN = f"{PREFIX}/sign-in"
#: Methods and paths that need no token.
PUBLIC = frozenset(
    {("POST", SIGN_IN), *((m, p) for m in ("GET", "HEAD") for p in (OPENAPI, reference.PATH))}
)
#: Prefixes of paths that are not pages of the dashboard.
OWN_PATHS = ("/api/", "/healthz", "/readyz", METRICS, wheel.PATH, *reference.USUAL)


def create_app(
    settings: Settings, ledger: RedisClient, storage: Storage, static: Path = STATIC
) -> FastAPI:
    """Create the application without connecting to anything.

    ``static``: folder of the built dashboard, which may be missing. Raises :class:`SpecError`
    if there is no token, or one that a header can't contain.
    """
    app = FastAPI(
        title="vcasgd",
        version=vcasgd.__version__,
        openapi_url=None,  # _document serves it
        # these pages would load scripts from third parties; _reference serves another one
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # The name is stable, and suits generated clients.
        generate_unique_id_function=lambda route: route.name,
    )
    services = app.state.services = Services(settings, ledger, storage, _token(settings))
    app.include_router(monitoring.router)
    app.include_router(wheel.router)
    app.include_router(tokens.entrance, prefix=PREFIX)
    app.include_router(_guarded())
    problems.install(app)
    app.add_middleware(Pages, static=static, others=OWN_PATHS)
    app.add_middleware(
        GZipMiddleware,
        minimum_size=GZIP_BYTES,
        compresslevel=GZIP_LEVEL,
        exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, files.MEDIA_TYPE),
    )
    app.add_middleware(BodyLimit, public=SIGN_IN, own=f"{PREFIX}/packages/")
    app.add_middleware(Concurrency)
    app.add_middleware(Authentication, callers=services.callers, prefix="/api/", public=PUBLIC)
    app.add_middleware(RequestIds)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    routes = {OPENAPI: _document(app), reference.PATH: _reference(app)}
    routes |= dict.fromkeys(reference.USUAL, _to_reference)
    for path, route in routes.items():
        app.add_route(path, route, methods=["GET", "HEAD"], include_in_schema=False)
    return app


def _guarded() -> APIRouter:
    anywhere = problems.documented(401, 403, 422, 429, 500, 503)
    router = APIRouter(prefix=PREFIX, responses=anywhere)
    for part in (tokens, jobs, history, files, fleet, shell, costs, joining):
        for route in part.router.routes:
            # a route without a scope would be open to every token
            assert isinstance(route, APIRoute)
            assert scope_of(route), f"{route.path} names no scope"
            # a path can name what does not exist, and a body can be too long
            statuses = [404] * ("{" in route.path) + [413] * bool(route.body_field)
            route.responses = problems.documented(*statuses) | route.responses
        router.include_router(part.router)
    return router


def _token(settings: Settings) -> str:
    token = settings.required("token").strip()
    if len(token) < MIN_SECRET or not token.isascii() or not token.isprintable():
        raise SpecError(
            f"VCASGD_TOKEN has fewer than {MIN_SECRET} characters, or some that a header can't "
            "contain",
            remedy="set it to the output of openssl rand -hex 32",
            field="VCASGD_TOKEN",
        )
    return token


def _document(app: FastAPI) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of the OpenAPI document, which is encoded once.

    It is long, and visitors may ask for it as often as they like.
    """

    @cache
    def encoded(*, compressed: bool) -> bytes:
        text = json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()
        return gzip.compress(text, GZIP_LEVEL) if compressed else text

    async def openapi(request: Request) -> Response:
        compressed = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"Vary": "Accept-Encoding"}
        if compressed:
            headers["Content-Encoding"] = "gzip"
        body = encoded(compressed=compressed)
        return Response(body, headers=headers, media_type="application/json")

    return openapi


def _reference(app: FastAPI) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of the page that shows the OpenAPI document."""

    @cache
    def made() -> str:
        return reference.page(app.openapi())

    async def show(_request: Request) -> Response:
        return HTMLResponse(made(), headers=HEADERS)

    return show


async def _to_reference(_request: Request) -> Response:
    return RedirectResponse(reference.PATH)


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            summary="Train PyTorch models on spot, preemptible and volunteer machines.",
            routes=app.routes,
        )
        schema["components"]["schemas"]["Problem"] = Problem.model_json_schema()
        app.openapi_schema = schema
    return app.openapi_schema
