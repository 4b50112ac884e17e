"""The application: routes, middleware, and the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import RedirectResponse
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
        summary="Train PyTorch models on spot, preemptible, and volunteer machines.",
        openapi_url=None,  # an own route serves it, and a page
        # these pages would load scripts from third parties
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
    routes = {
        OPENAPI: _made_once(lambda: json.dumps(app.openapi()), "application/json"),
        reference.PATH: _made_once(lambda: reference.page(app.openapi()), "text/html"),
        **dict.fromkeys(reference.USUAL, _to_reference),
    }
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


def _made_once(
    make: Callable[[], str], media_type: str
) -> Callable[[Request], Awaitable[Response]]:
    """Return a route of a text that is made for the first request."""
    made = cache(make)

    async def show(_request: Request) -> Response:
        return Response(made(), headers=HEADERS, media_type=media_type)

    return show


async def _to_reference(_request: Request) -> Response:
    return RedirectResponse(reference.PATH)


def _openapi(app: FastAPI) -> dict[str, Any]:
    document = FastAPI.openapi(app)
    document["components"]["schemas"]["Problem"] = Problem.model_json_schema()
    return document
