"""Routes for signing in and out of the dashboard."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response, status

import vcasgd
from vcasgd.api.access import READ, CallerDep, refusal
from vcasgd.api.auth import cross_site
from vcasgd.api.dependencies import CallersDep, SettingsDep
from vcasgd.api.problems import documented
from vcasgd.api.sessions import clear_cookie, set_cookie
from vcasgd.errors import Unauthorized
from vcasgd.schemas.service import CallerView, SessionView, SignIn
from vcasgd.spec.access import Scope

#: The only route that needs no token, because the token is in the body.
entrance = APIRouter(tags=["session"])
router = APIRouter(tags=["session"])


@entrance.post(
    "/session",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=documented(401, 403, 413, 422, 500, 503),
)
async def sign_in(callers: CallersDep, request: Request, response: Response, body: SignIn) -> None:
    """Sign in: set a cookie that is valid for twelve hours and that scripts can't read."""
    # another site must not be able to sign a user in
    if error := cross_site(request.headers):
        raise error
    caller = await callers.of_token(body.token.get_secret_value())
    if caller is None:
        raise Unauthorized("the token is wrong", remedy="vcasgd up prints the file of its token")
    if error := refusal(caller, Scope.READ):
        raise error
    cookie = callers.new_session(caller)
    set_cookie(response, cookie, secure=request.url.scheme == "https")


@router.get("/session", dependencies=READ)
def get_session(settings: SettingsDep) -> SessionView:
    """Show the session. The status is 401 if you are not signed in."""
    return SessionView(cluster=settings.cluster, version=vcasgd.__version__)


@router.delete("/session", dependencies=READ, status_code=status.HTTP_204_NO_CONTENT)
def sign_out(request: Request, response: Response) -> None:
    """Sign out: delete the cookie."""
    clear_cookie(response, secure=request.url.scheme == "https")


@router.get("/me", dependencies=READ)
def get_me(caller: CallerDep) -> CallerView:
    """Show the name, scope, and limits of the token that this request was sent with."""
    return CallerView.model_validate(caller)
