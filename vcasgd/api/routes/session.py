"""Signing in and out, for the dashboard."""

from __future__ import annotations

import secrets
from typing import Literal

from fastapi import APIRouter, Request, Response, status
from pydantic import BaseModel, ConfigDict, Field, SecretStr

import vcasgd
from vcasgd.api.auth import from_elsewhere
from vcasgd.api.problems import documented
from vcasgd.api.services import Here
from vcasgd.api.sessions import clear_cookie, set_cookie
from vcasgd.errors import Unauthorized

#: without the token: this is where it is handed in
entrance = APIRouter(tags=["session"])
router = APIRouter(tags=["session"])


class SignIn(BaseModel):
    """The token that the platform was started with."""

    model_config = ConfigDict(extra="forbid")

    token: SecretStr = Field(max_length=1000)


class SessionView(BaseModel):
    """Who is signed in is told where."""

    signed_in: Literal[True] = True
    cluster: str
    version: str


@entrance.post(
    "/session", status_code=status.HTTP_204_NO_CONTENT, responses=documented(401, 403, 422, 500)
)
def sign_in(here: Here, request: Request, response: Response, body: SignIn) -> None:
    """Sets a cookie that is good for twelve hours, and that no script can read."""
    # another site must not sign anybody in
    if error := from_elsewhere(request.headers):
        raise error
    given = body.token.get_secret_value().strip().encode("utf-8", "surrogatepass")
    if not secrets.compare_digest(given, here.settings.secret("token").strip().encode()):
        raise Unauthorized("the token is wrong", remedy="vcasgd up says in which file it is")
    set_cookie(response, here.sessions.new(), secure=request.url.scheme == "https")


@router.get("/session")
def get_session(here: Here) -> SessionView:
    """Whether one is signed in: 401 if not."""
    return SessionView(cluster=here.settings.cluster, version=vcasgd.__version__)


@router.delete("/session", status_code=status.HTTP_204_NO_CONTENT)
def sign_out(request: Request, response: Response) -> None:
    """Takes the cookie back."""
    clear_cookie(response, secure=request.url.scheme == "https")
