"""The API itself: health, sessions, packages, and errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from vcasgd.schemas.base import RequestBody, Schema


class Health(Schema):
    """Health of the API's process."""

    status: Literal["ok", "unavailable"]
    reasons: list[str] = Field(default=[], description="Reasons why requests would fail.")


class Package(Schema):
    """A stored package: a zip of a job's code."""

    digest: str
    size: int = Field(description="Size in bytes.")


class SignIn(RequestBody):
    """Credentials for a session."""

    token: SecretStr = Field(max_length=1000, description="An API token.")


class SessionView(Schema):
    """Session of a dashboard, and the cluster that it belongs to."""

    signed_in: Literal[True] = True
    cluster: str
    version: str


class Problem(Schema):
    """Problem document of RFC 9457. `type` is stable; the other fields are for people."""

    type: str
    title: str
    status: int
    detail: str
    field: str | None = Field(default=None, description="Field that is wrong.")
    remedy: str | None = Field(default=None, description="What to do about the problem.")
    traceback: str | None = Field(default=None, description="Traceback of the user's code.")
    version: str | None = Field(
        default=None, description="Version of the stack, if the machine's has to be the same."
    )
    request: str | None = Field(
        default=None, description="ID of the request; the log lines about it have it too."
    )
