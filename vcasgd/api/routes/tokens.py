"""Routes for API tokens, and for signing in to the dashboard with one."""

from __future__ import annotations

import logging
import time

from fastapi import APIRouter, Request, Response, status

import vcasgd
from vcasgd.api.access import ADMIN, READ, CallerDep, ServicesDep, cross_site, refusal
from vcasgd.api.callers import COOKIE, SIGN_IN_SECONDS
from vcasgd.api.problems import documented
from vcasgd.api.wheel import install_command
from vcasgd.errors import NotFound, SpecError, Unauthorized
from vcasgd.fleet.pools import JOINING_PROVIDERS
from vcasgd.schemas.service import (
    CallerView,
    NewToken,
    SignIn,
    SignInView,
    TokenRequest,
    TokenView,
)
from vcasgd.spec.access import Scope
from vcasgd.store.ledger.costs import month_of

log = logging.getLogger(__name__)

#: The only route that needs no token, because the token is in the body.
entrance = APIRouter(tags=["sign-in"])
router = APIRouter()


@entrance.post(
    "/sign-in",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=documented(401, 403, 413, 422, 500, 503),
)
async def sign_in(
    services: ServicesDep, request: Request, response: Response, body: SignIn
) -> None:
    """Sign in: set a cookie that is valid for twelve hours and that scripts can't read."""
    # another site must not be able to sign a user in
    if error := cross_site(request.headers):
        raise error
    caller = await services.callers.of_token(body.token.get_secret_value())
    if caller is None:
        raise Unauthorized("the token is wrong", remedy="vcasgd up prints the file of its token")
    if error := refusal(caller, Scope.READ):
        raise error
    response.set_cookie(
        COOKIE,
        services.callers.sign_ins.new(caller),
        max_age=SIGN_IN_SECONDS,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


@router.get("/sign-in", dependencies=READ, tags=["sign-in"])
def get_sign_in(services: ServicesDep) -> SignInView:
    """Show the cluster that you are signed in to. The status is 401 if you are not."""
    return SignInView(cluster=services.settings.cluster, version=vcasgd.__version__)


@router.delete(
    "/sign-in", dependencies=READ, status_code=status.HTTP_204_NO_CONTENT, tags=["sign-in"]
)
def sign_out(request: Request, response: Response) -> None:
    """Sign out: delete the cookie."""
    response.delete_cookie(
        COOKIE, secure=request.url.scheme == "https", httponly=True, samesite="strict"
    )


@router.get("/me", dependencies=READ, tags=["sign-in"])
def get_me(caller: CallerDep) -> CallerView:
    """Show the name, scope, and limits of the token that this request was sent with."""
    return CallerView.model_validate(caller)


@router.post(
    "/tokens",
    dependencies=ADMIN,
    status_code=status.HTTP_201_CREATED,
    responses=documented(409, 507),
    tags=["tokens"],
)
def create_token(
    services: ServicesDep, caller: CallerDep, response: Response, body: TokenRequest
) -> NewToken:
    """Create a token for a user. Only this response contains its secret."""
    pools = services.control.pools()
    joined = sorted(name for name, row in pools.items() if row.get("provider") in JOINING_PROVIDERS)
    remedy = f"choose from {', '.join(joined)}" if joined else "add a pool with provider: join"
    if body.scope is Scope.JOIN and body.pool is None:
        raise SpecError("pool: is required with scope join", remedy=remedy, field="pool")
    if body.scope is not Scope.JOIN and body.pool is not None:
        raise SpecError("pool: is only for scope join", remedy="leave it out", field="pool")
    if body.pool is not None and pools and body.pool not in pools:
        raise SpecError(f"pool: there is no pool {body.pool}", remedy=remedy, field="pool")
    if body.pool is not None and pools and body.pool not in joined:
        text = f"pool: machines can't join {body.pool}, which launches its own"
        raise SpecError(text, remedy=remedy, field="pool")
    lifetime = body.expires.total_seconds() if body.expires else None
    token, text = services.tokens.create(
        body.name,
        body.scope,
        max_machines=body.max_machines,
        max_usd_per_month=body.max_usd_per_month,
        lifetime=lifetime,
        pool=body.pool,
    )
    joins = body.scope is Scope.JOIN
    if joins and services.settings.join_pin:
        text = f"{text}.{services.settings.join_pin}"
    services.callers.tokens_changed()
    log.info("%s created the token %s with scope %s", caller.name, token.name, token.scope)
    response.headers["Cache-Control"] = "no-store"
    url = services.settings.join_url if joins else None
    fields = {"token": text, "join_url": url, **_installation(url, services.settings.join_pin)}
    return NewToken.model_validate({**token.model_dump(), **fields})


def _installation(url: str | None, pin: str | None) -> dict[str, str]:
    """Return the fields of a new token about the installation of the machines that use it."""
    if url is None:
        return {}
    try:
        return {"install": install_command(url, own_certificate=pin is not None)}
    except NotFound as error:
        return {"not_installable": str(error)}


@router.get("/tokens", dependencies=ADMIN, tags=["tokens"])
def list_tokens(services: ServicesDep) -> list[TokenView]:
    """List all tokens by name, without their secrets, also expired ones."""
    uses, now = services.tokens.last_uses(), time.time()
    spent = services.costs.spent_in(month_of(now))
    return [
        TokenView.model_validate(
            {
                **token.model_dump(),
                "month_usd": spent.get(name, 0.0),
                "last_used_at": uses.get(name),
                "expired": token.expired(now),
            }
        )
        for name, token in services.tokens.all().items()
    ]


@router.delete(
    "/tokens/{name}",
    dependencies=ADMIN,
    status_code=status.HTTP_204_NO_CONTENT,
    tags=["tokens"],
)
def revoke_token(services: ServicesDep, caller: CallerDep, name: str) -> None:
    """Revoke a token. Its requests, streams, and sign-ins end within seconds; its jobs go on."""
    services.tokens.revoke(name)
    services.callers.tokens_changed()
    log.info("%s revoked the token %s", caller.name, name)
