"""The application: routes, errors, the token, and the document that describes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Security
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from fastapi.security import APIKeyCookie, HTTPBearer
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware

import vcasgd
from vcasgd.api import problems
from vcasgd.api.auth import METRICS, Authentication
from vcasgd.api.overview import Overview
from vcasgd.api.pages import GZIP_BYTES, STATIC, Pages
from vcasgd.api.requests import RequestIds
from vcasgd.api.routes import (
    checkpoints,
    fleet,
    health,
    history,
    insight,
    jobs,
    metrics,
    money,
    packages,
    session,
    spec,
    store,
    stream,
)
from vcasgd.api.services import Services
from vcasgd.api.sessions import COOKIE, Sessions
from vcasgd.errors import SpecError
from vcasgd.settings import Settings
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient

PREFIX = "/api/v1"
#: rows of the same fields shrink to a tenth; more effort than this gains little
GZIP_LEVEL = 4
OPENAPI = f"{PREFIX}/openapi.json"
#: what anybody may ask
PUBLIC = frozenset({("GET", OPENAPI), ("HEAD", OPENAPI), ("POST", f"{PREFIX}/session")})
#: what is no page of the dashboard
OWN_PATHS = ("/api/", "/healthz", "/readyz", METRICS)


def create_app(
    settings: Settings, ledger: RedisClient, storage: Storage, static: Path = STATIC
) -> FastAPI:
    """The API over one ledger and one object storage; nothing is connected to yet.

    ``static``: where the built dashboard is, if it is built.
    Raises :class:`SpecError` where there is no token, or one that nobody could send.
    """
    app = FastAPI(
        title="vcasgd",
        version=vcasgd.__version__,
        openapi_url=OPENAPI,
        # these pages would fetch scripts from third parties
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
    )
    token = _token(settings)
    sessions = Sessions(token)
    app.state.services = services = Services.over(settings, ledger, storage, sessions)
    app.state.overview = Overview(services)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(session.entrance, prefix=PREFIX)
    app.include_router(_guarded())
    problems.install(app)
    app.add_middleware(
        GZipMiddleware,
        minimum_size=GZIP_BYTES,
        compresslevel=GZIP_LEVEL,
        exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, checkpoints.MEDIA_TYPE),
    )
    app.add_middleware(
        Authentication, token=token, sessions=sessions, prefix="/api/", public=PUBLIC
    )
    app.add_middleware(Pages, static=static, others=OWN_PATHS)
    app.add_middleware(RequestIds)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _guarded() -> APIRouter:
    # only describe what Guard asks for before a route is looked for
    schemes = [
        Security(HTTPBearer(auto_error=False, scheme_name="token")),
        Security(APIKeyCookie(name=COOKIE, auto_error=False, scheme_name="session")),
    ]
    anywhere = problems.documented(401, 403, 422, 500, 503)
    router = APIRouter(prefix=PREFIX, dependencies=schemes, responses=anywhere)
    parts = (
        session, jobs, spec, history, insight, stream, checkpoints, packages, fleet, store, money,
    )  # fmt: skip
    for part in parts:
        router.include_router(part.router)
    return router


def _token(settings: Settings) -> str:
    token = settings.secret("token").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise SpecError(
            "VCASGD_TOKEN is empty or holds characters that no header can carry",
            field="VCASGD_TOKEN",
        )
    return token


def _operation_id(route: APIRoute) -> str:
    """The function's name: stable, and good for a method of a generated client."""
    return route.name


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            summary="Train PyTorch models on machines that vanish.",
            routes=app.routes,
        )
        schema["components"]["schemas"]["Problem"] = problems.Problem.model_json_schema()
        app.openapi_schema = schema
    return app.openapi_schema
