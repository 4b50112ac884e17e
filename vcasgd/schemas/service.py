"""The API itself: health, sign-ins, packages, tokens, and errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from vcasgd.errors import (
    CheckpointDamaged,
    Conflict,
    Forbidden,
    NotFound,
    Overloaded,
    PackageError,
    SpecError,
    StorageUnavailable,
    StoreFull,
    StoreUnavailable,
    Unauthorized,
    VcasgdError,
    VersionDiffers,
)
from vcasgd.schemas.base import RequestBody, Schema
from vcasgd.spec.access import Lifetime, MachineLimit, MonthlyBudget, PoolName, Scope, TokenName


class Health(Schema):
    """Health of the API's process."""

    status: Literal["ok", "unavailable"]
    reasons: list[str] = Field(default=[], description="Reasons why requests would fail.")


class Package(Schema):
    """A stored package: a zip of a job's code."""

    digest: str
    size: int = Field(description="Size in bytes.")


class SignIn(RequestBody):
    """Credentials for the dashboard."""

    token: SecretStr = Field(max_length=1000, description="An API token.")


class SignInView(Schema):
    """The cluster that a browser is signed in to."""

    signed_in: Literal[True] = True
    cluster: str
    version: str


#: Type of a problem document, class of its error, and status; subclasses first. Any other error is
#: an internal one.
PROBLEMS: tuple[tuple[str, type[VcasgdError], int], ...] = (
    ("invalid-request", SpecError, 422),
    ("invalid-package", PackageError, 422),
    ("unauthorized", Unauthorized, 401),
    ("forbidden", Forbidden, 403),
    ("not-found", NotFound, 404),
    ("version-differs", VersionDiffers, 409),
    ("conflict", Conflict, 409),
    ("overloaded", Overloaded, 503),
    ("store-unavailable", StoreUnavailable, 503),
    ("store-full", StoreFull, 507),
    ("storage-unavailable", StorageUnavailable, 503),
    ("checkpoint-damaged", CheckpointDamaged, 500),
)


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


_LIMIT = (
    "Most machines that all jobs of this user have at a time; null without a limit. With scope "
    "join: that have joined at a time; null for the usual limit."
)


_BUDGET = (
    "Most that the machines of this user's jobs cost in a calendar month (UTC); then they are "
    "paused. null without a budget."
)


class CallerView(Schema):
    """Token that a request was sent with, also if a sign-in stands for it."""

    name: str = Field(description="Name of the token, which is the user's.")
    scope: Scope
    max_machines: int | None = Field(default=None, description=_LIMIT)
    max_usd_per_month: float | None = Field(default=None, description=_BUDGET)
    expires_at: float | None = Field(default=None, description="null: never")


class TokenView(CallerView):
    """An API token, without its secret, of which only a digest is stored. Times are Unix
    seconds."""

    created_at: float
    pool: str | None = Field(
        default=None, description="Pool that machines with this token join; only with scope join."
    )
    month_usd: float = Field(default=0.0, description="Cost of the user's jobs in this month.")
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
    install: str | None = Field(
        default=None,
        description="Command that installs the stack's version of vcasgd on them. It names the "
        "digest of what it downloads.",
    )
    not_installable: str | None = Field(
        default=None, description="Why the stack can't offer its package."
    )


class TokenRequest(RequestBody):
    """A token to create."""

    name: TokenName = Field(description="Name of the user: lowercase letters, digits, and hyphens.")
    scope: Scope
    max_machines: MachineLimit | None = Field(default=None, description=_LIMIT)
    max_usd_per_month: MonthlyBudget | None = Field(default=None, description=_BUDGET)
    pool: PoolName | None = Field(
        default=None, description="Pool that machines join; required with scope join, else null."
    )
    expires: Lifetime | None = Field(
        default=None, description="Lifetime in seconds, or as text such as 30d. null: no end."
    )
