"""Access: the scope that each route requires, and the owner that a job's changes require."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.params import Security as SecurityParam
from fastapi.routing import APIRoute
from fastapi.security import APIKeyCookie, HTTPBearer, SecurityScopes

from vcasgd.api.callers import CALLER_KEY, Caller, Callers
from vcasgd.api.sessions import COOKIE
from vcasgd.api.streaming import StillValid
from vcasgd.errors import Forbidden
from vcasgd.spec.access import Scope
from vcasgd.store.ledger.job import JobRecord


async def _caller(request: Request) -> Caller:
    # the Authentication middleware lets no other request pass
    caller: Caller = request.scope[CALLER_KEY]
    return caller


async def _still_valid(request: Request) -> StillValid:
    callers: Callers = request.app.state.services[Callers]
    return partial(callers.still_valid, await _caller(request))


CallerDep = Annotated[Caller, Depends(_caller)]
StillValidDep = Annotated[StillValid, Depends(_still_valid)]


async def check_scope(
    caller: CallerDep,
    required: SecurityScopes,
    # these only describe what the Authentication middleware checks before routing
    _token: Annotated[Any, Security(HTTPBearer(auto_error=False, scheme_name="token"))],
    _session: Annotated[
        Any, Security(APIKeyCookie(name=COOKIE, auto_error=False, scheme_name="session"))
    ],
) -> None:
    """Check the caller's scope. Raises :class:`Forbidden`."""
    for scope in required.scopes:
        if error := refusal(caller, Scope(scope)):
            raise error


def _needs(scope: Scope) -> tuple[Any, ...]:
    return (Security(check_scope, scopes=[scope]),)


#: ``dependencies`` of a route; each route has one of these.
READ, SUBMIT, ADMIN = _needs(Scope.READ), _needs(Scope.SUBMIT), _needs(Scope.ADMIN)
JOIN = _needs(Scope.JOIN)


def scope_of(route: APIRoute) -> Scope | None:
    """Return the scope that a route requires, None if it names none."""
    scopes = [
        scope
        for dependency in route.dependencies
        if isinstance(dependency, SecurityParam) and dependency.dependency is check_scope
        for scope in dependency.scopes or ()
    ]
    return Scope(scopes[0]) if len(scopes) == 1 else None


def refusal(caller: Caller, needed: Scope) -> Forbidden | None:
    """Return the error for a route that needs a scope, or None if the caller's includes it."""
    if caller.scope.includes(needed):
        return None
    return Forbidden(
        f"this needs a token with scope {needed}; {caller.name} has scope {caller.scope}",
        remedy=f"ask an administrator for one: vcasgd token create NAME --scope {needed}",
    )


def refusal_for_job(caller: Caller, job: str, owner: str | None) -> Forbidden | None:
    """Return the error for a change of a job, or None: only its owner and admins may."""
    if caller.scope.includes(Scope.ADMIN) or (
        caller.scope.includes(Scope.SUBMIT) and owner == caller.name
    ):
        return None
    return Forbidden(
        f"job {job} belongs to {owner or 'nobody'}, not to {caller.name}; jobs of others need a "
        f"token with scope {Scope.ADMIN}",
        remedy=f"ask {owner or 'an administrator'}, or use a token with scope {Scope.ADMIN}",
    )


def check_owner(caller: Caller, job: JobRecord) -> None:
    """Check that the caller may change a job. Raises :class:`Forbidden`."""
    if error := refusal_for_job(caller, job.id, job.owner):
        raise error
