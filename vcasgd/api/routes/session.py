"""Routes for signing in and out of the dashboard."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request, Response, status

import vcasgd
from vcasgd.api.auth import clear_cookie, cross_site, set_cookie
from vcasgd.api.dependencies import SessionsDep, SettingsDep
from vcasgd.api.problems import documented
from vcasgd.errors import Unauthorized
from vcasgd.schemas.service import SessionView, SignIn

#: The only route that needs no token, because the token is in the body.
entrance = APIRouter(tags=["session"])
router = APIRouter(tags=["session"])


@entrance.post(
    "/session",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=documented(401, 403, 413, 422, 500),
)
def sign_in(
    settings: SettingsDep, sessions: SessionsDep, request: Request, response: Response, body: SignIn
) -> None:
    """Sign in: set a cookie that is valid for twelve hours and that scripts can't read."""
    # another site must not be able to sign a user in
    if error := cross_site(request.headers):
        raise error
    token = body.token.get_secret_value().strip().encode("utf-8", "surrogatepass")
    if not secrets.compare_digest(token, settings.secret("token").strip().encode()):
        raise Unauthorized("the token is wrong", remedy="vcasgd up prints the token's file")
    set_cookie(response, sessions.new(), secure=request.url.scheme == "https")


@router.get("/session")
def get_session(settings: SettingsDep) -> SessionView:
    """Show the session. The status is 401 if you are not signed in."""
    return SessionView(cluster=settings.cluster, version=vcasgd.__version__)


@router.delete("/session", status_code=status.HTTP_204_NO_CONTENT)
def sign_out(request: Request, response: Response) -> None:
    """Sign out: delete the cookie."""
    clear_cookie(response, secure=request.url.scheme == "https")
