"""Routes for API tokens."""

from __future__ import annotations

import logging
import time

from fastapi import APIRouter, Response, status

from vcasgd.api.access import ADMIN, CallerDep
from vcasgd.api.dependencies import ApiTokensDep, CallersDep, SettingsDep
from vcasgd.api.problems import documented
from vcasgd.errors import SpecError
from vcasgd.schemas.service import NewToken, TokenRequest, TokenView
from vcasgd.spec.access import Scope

log = logging.getLogger(__name__)

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokens",
    dependencies=ADMIN,
    status_code=status.HTTP_201_CREATED,
    responses=documented(409, 413, 507),
)
def create_token(
    settings: SettingsDep,
    tokens: ApiTokensDep,
    callers: CallersDep,
    caller: CallerDep,
    response: Response,
    body: TokenRequest,
) -> NewToken:
    """Create a token for a user. Only this response contains its secret."""
    if (body.scope is Scope.JOIN) != (body.pool is not None):
        raise SpecError("pool: required with scope join, and only allowed with it", field="pool")
    lifetime = body.expires.total_seconds() if body.expires else None
    token, text = tokens.create(
        body.name,
        body.scope,
        max_machines=body.max_machines,
        lifetime=lifetime,
        pool=body.pool,
    )
    joins = body.scope is Scope.JOIN
    if joins and settings.join_pin:
        text = f"{text}.{settings.join_pin}"
    callers.tokens_changed()
    log.info("%s created the token %s with scope %s", caller.name, token.name, token.scope)
    response.headers["Cache-Control"] = "no-store"
    url = settings.join_url if joins else None
    return NewToken.model_validate({**token.model_dump(), "token": text, "join_url": url})


@router.get("/tokens", dependencies=ADMIN)
def list_tokens(tokens: ApiTokensDep) -> list[TokenView]:
    """List all tokens by name, without their secrets, also expired ones."""
    uses, now = tokens.last_uses(), time.time()
    return [
        TokenView.model_validate(
            {
                **token.model_dump(),
                "last_used_at": uses.get(name),
                "expired": token.expired(now),
            }
        )
        for name, token in tokens.all().items()
    ]


@router.delete(
    "/tokens/{name}",
    dependencies=ADMIN,
    status_code=status.HTTP_204_NO_CONTENT,
    responses=documented(404),
)
def revoke_token(
    tokens: ApiTokensDep,
    callers: CallersDep,
    caller: CallerDep,
    name: str,
) -> None:
    """Revoke a token. Its requests, streams, and sessions end within seconds; its jobs go on."""
    tokens.revoke(name)
    callers.tokens_changed()
    log.info("%s revoked the token %s", caller.name, name)
