"""API tokens, and the caller of a request."""

from __future__ import annotations

from pydantic import Field

from vcasgd.schemas.base import RequestBody, Schema
from vcasgd.spec.access import Lifetime, MachineLimit, PoolName, Scope, TokenName

_LIMIT = (
    "Most machines that all jobs of this user have at a time; null without a limit. With scope "
    "join: that have joined at a time; null for the usual limit."
)


class CallerView(Schema):
    """Token that a request was sent with, also if a session stands for it."""

    name: str = Field(description="Name of the token, which is the user's.")
    scope: Scope
    max_machines: int | None = Field(default=None, description=_LIMIT)
    expires_at: float | None = Field(default=None, description="null: never")


class TokenView(Schema):
    """An API token, without its secret, of which only a digest is stored. Times are Unix
    seconds."""

    name: str
    scope: Scope
    created_at: float
    expires_at: float | None = Field(default=None, description="null: never")
    max_machines: int | None = Field(default=None, description=_LIMIT)
    pool: str | None = Field(
        default=None, description="Pool that machines with this token join; only with scope join."
    )
    last_used_at: float | None = Field(
        default=None, description="Time of the last use, to about a minute; null: never used."
    )
    expired: bool = False


class NewToken(TokenView):
    """A new token with its secret, which no other response contains."""

    # not in the repr, which may end up in a log
    token: str = Field(
        repr=False,
        description="Value of the bearer token. Store it now. With scope join and a certificate of "
        "the stack's own, a point and the SHA-256 of that certificate follow.",
    )
    join_url: str | None = Field(
        default=None, description="Address that machines join, if it is known."
    )


class TokenRequest(RequestBody):
    """A token to create."""

    name: TokenName = Field(description="Name of the user: lowercase letters, digits, and hyphens.")
    scope: Scope
    max_machines: MachineLimit | None = Field(default=None, description=_LIMIT)
    pool: PoolName | None = Field(
        default=None, description="Pool that machines join; required with scope join, else null."
    )
    expires: Lifetime | None = Field(
        default=None, description="Lifetime in seconds, or as text such as 30d. null: no end."
    )
