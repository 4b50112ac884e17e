"""Dependencies of routes: the services, authentication, scopes, and the owners of jobs."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import partial
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from fastapi import Depends, Path, Request, Security
from fastapi.params import Security as SecurityParam
from fastapi.routing import APIRoute
from fastapi.security import APIKeyCookie, HTTPBearer, SecurityScopes
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from vcasgd.api.callers import CALLER_KEY, COOKIE, Caller, Callers
from vcasgd.api.history import Curves, StillValid
from vcasgd.api.middleware import SAFE_METHODS, Places
from vcasgd.api.platform import Platform
from vcasgd.api.problems import problem_response
from vcasgd.errors import Forbidden, Unauthorized, VcasgdError
from vcasgd.limits import MAX_UPLOADS, MAX_UPLOADS_PER_TOKEN
from vcasgd.settings import Settings
from vcasgd.spec.access import Scope
from vcasgd.storage.objects import Storage
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.api_tokens import ApiTokens
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.costs import Costs, Workloads
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.ledger.servers import Servers
from vcasgd.store.ledger.workers import WorkerBeats


class Services:
    """Objects that all requests share."""

    def __init__(
        self, settings: Settings, ledger: RedisClient, storage: Storage, token: str
    ) -> None:
        """Create the services without connecting to anything. ``token``: the stack's own."""
        self.settings = settings
        self.ledger = ledger
        self.storage = storage
        self.tokens = ApiTokens(ledger)
        self.callers = Callers(token, self.tokens)
        self.uploads = Places("uploads", MAX_UPLOADS, MAX_UPLOADS_PER_TOKEN)
        self.jobs = Jobs(ledger)
        self.control = Control(ledger)
        self.servers = Servers(ledger)
        self.beats = WorkerBeats(ledger)
        self.joined = JoinedMachines(ledger, settings.lease_seconds)
        self.costs = Costs(ledger)
        self.workloads = Workloads(ledger)
        self.curves = Curves(ledger)
        self.platform = Platform(ledger)


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(_services)]


def _job(
    services: ServicesDep, job: Annotated[str, Path(description="ID of the job, not its name.")]
) -> JobRecord:
    """Return a job. Raises :class:`~vcasgd.errors.NotFound`."""
    return services.jobs.get(job)


#: The job in the path of a route.
JobDep = Annotated[JobRecord, Depends(_job)]


#: Header of the dashboard's requests. Forms and links of other sites can't set it.
PAGE_HEADER = "X-Vcasgd-Request"
PAGE_HEADER_VALUE = "dashboard"
#: Path of the metrics; clients on this machine need no token for it.
METRICS = "/metrics"
#: Headers of a proxy that forwards the request of another client.
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host")


async def _caller(request: Request) -> Caller:
    # the Authentication middleware lets no other request pass
    caller: Caller = request.scope[CALLER_KEY]
    return caller


CallerDep = Annotated[Caller, Depends(_caller)]


async def _still_valid(services: ServicesDep, caller: CallerDep) -> StillValid:
    return partial(services.callers.still_valid, caller)


def _own_job(caller: CallerDep, job: JobDep) -> JobRecord:
    """Return the job. Raises :class:`Forbidden` unless the caller may change it."""
    if error := refusal_for_job(caller, job.id, job.owner):
        raise error
    return job


StillValidDep = Annotated[StillValid, Depends(_still_valid)]
#: The job in the path of a route that changes it.
OwnJobDep = Annotated[JobRecord, Depends(_own_job)]


async def check_scope(
    caller: CallerDep,
    required: SecurityScopes,
    # these only describe what the Authentication middleware checks before routing
    _token: Annotated[Any, Security(HTTPBearer(auto_error=False, scheme_name="token"))],
    _cookie: Annotated[
        Any, Security(APIKeyCookie(name=COOKIE, auto_error=False, scheme_name="sign-in"))
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


# -- authentication -----------------------------------------------------------------------------


class Authentication:
    """Middleware that refuses requests without a valid token or sign-in.

    It runs before the routes: the API never reads the body of an unauthenticated request, and
    the response doesn't reveal whether a job exists. It guards paths that start with ``prefix``,
    except the pairs of method and path in ``public``. The routes find the caller in the ASGI scope,
    and check what it may do (:mod:`vcasgd.api.access`).
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        callers: Callers,
        prefix: str,
        public: Collection[tuple[str, str]],
    ) -> None:
        self._app = app
        self._callers = callers
        self._prefix = prefix
        self._public = public

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            if self._guards(scope, headers):
                try:
                    caller = scope[CALLER_KEY] = await self._caller(scope, headers)
                    # the metrics are no route, so nothing else checks this
                    if scope["path"] == METRICS and (error := refusal(caller, Scope.READ)):
                        raise error
                except VcasgdError as refused:
                    await problem_response(refused)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _guards(self, scope: AsgiScope, headers: Headers) -> bool:
        path = scope["path"]
        if path == METRICS:
            return not _is_local(scope, headers)
        public = (scope.get("method", "GET"), path) in self._public
        return path.startswith(self._prefix) and not public

    async def _caller(self, scope: AsgiScope, headers: Headers) -> Caller:
        """Return the caller with the bearer token, or else of the sign-in."""
        caller = await self._callers.of_token(_bearer_token(headers))
        if caller is not None:
            return caller
        caller = await self._callers.of_cookies(headers.get("cookie", ""))
        if caller is None:
            raise Unauthorized(
                "the bearer token is missing or wrong",
                remedy="name a token of this API with VCASGD_TOKEN or --token, or in the header "
                "Authorization: Bearer <token>; that of a local stack is in its file token",
            )
        if scope.get("method", "GET") not in SAFE_METHODS and (error := forgery(headers)):
            raise error
        return caller


def _bearer_token(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def forgery(headers: Headers) -> Forbidden | None:
    """Return the error for a request with a cookie that the dashboard didn't send, or None."""
    if headers.get(PAGE_HEADER) != PAGE_HEADER_VALUE:
        return Forbidden(
            f"the header {PAGE_HEADER} is missing",
            remedy=f"send {PAGE_HEADER}: {PAGE_HEADER_VALUE}, or the bearer token",
        )
    return cross_site(headers)


def cross_site(headers: Headers) -> Forbidden | None:
    """Return the error for a request that a page of another site sent, or None."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    # schemes are not compared: they differ in front of and behind a proxy that terminates TLS
    own = _split(origin or "").netloc.lower() or None
    same_origin = origin is None or own == headers.get("host", "").lower()
    if same_origin and site in (None, "same-origin"):
        return None
    return Forbidden("the request comes from another site", remedy="use the dashboard itself")


def _is_local(scope: AsgiScope, headers: Headers) -> bool:
    """Return True if a process of this machine sent the request to it, and not for another client.

    A page whose name resolves to this machine sends its own name as the host.
    """
    client = scope.get("client")
    if client is None or any(name in headers for name in _FORWARDED):
        return False
    host = _split(f"//{headers.get('host', '')}").hostname or ""
    return _is_loopback(client[0]) and (host == "localhost" or _is_loopback(host))


def _split(url: str) -> SplitResult:
    """Return the parts of a URL, which are empty if it is invalid."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
