"""Requests of an agent to the API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import vcasgd
from vcasgd.agent.link import UNMEASURED, LinkSpeed
from vcasgd.agent.machine import Machine
from vcasgd.agent.trust import GatewayAddress, JoinToken
from vcasgd.client.transport import FILE_SECONDS, Transport, path_of
from vcasgd.errors import Unauthorized
from vcasgd.schemas.machines import (
    MACHINE_SECRET,
    JoinRequest,
    JoinView,
    OrderView,
    ReportBody,
    ReportView,
)
from vcasgd.task.package import unpack

#: Seconds for an answer.
ANSWER_SECONDS = 10.0


class AgentConnection:
    """Connection to the API. Methods raise :class:`~vcasgd.errors.ApiError`."""

    def __init__(self, gateway: GatewayAddress, token: JoinToken, secret: str) -> None:
        """``secret``: random text that shows requests of this machine."""
        self._api = Transport(
            gateway.url,
            token.text,
            ANSWER_SECONDS,
            tls=gateway.api_tls,
            headers={MACHINE_SECRET: secret},
        )
        self._machine = ""

    def close(self) -> None:
        """Close all connections."""
        self._api.close()

    def round_trip_ms(self) -> float:
        """Return the time of a short request, without the connection."""
        self._api.call("HEAD", "openapi.json")
        began = time.perf_counter()
        self._api.call("HEAD", "openapi.json")
        return (time.perf_counter() - began) * 1000

    def join(
        self, machine: Machine, round_trip_ms: float, link: LinkSpeed = UNMEASURED
    ) -> JoinView:
        """Join. Raises :class:`~vcasgd.errors.Conflict` with the reason if that isn't possible."""
        body = JoinRequest(
            version=vcasgd.__version__, round_trip_ms=round_trip_ms, **vars(machine), **vars(link)
        )
        # Fields without a value are left out, so that an older stack can answer that it is older.
        with _clear_refusals():
            view = self._api.post(JoinView, "join", body.model_dump(exclude_none=True))
        self._machine = view.machine
        return view

    def report(self, body: ReportBody) -> ReportView:
        """Report the state of the machine.

        Raises :class:`~vcasgd.errors.NotFound` if the machine was removed.
        """
        path = path_of("machines", self._machine, "report")
        with _clear_refusals():
            return self._api.post(ReportView, path, body.model_dump())

    def fetch_code(self, order: OrderView, into: Path) -> None:
        """Fetch and unpack the code of a job. Raises :class:`~vcasgd.errors.PackageError`."""
        if (into / order.package).is_dir():
            return
        path = path_of("machines", self._machine, "packages", order.package)
        response = self._api.call("GET", path, timeout=FILE_SECONDS)
        unpack(response.content, order.package, into)

    def leave(self) -> None:
        """Leave."""
        self._api.call("DELETE", path_of("machines", self._machine))


@contextmanager
def _clear_refusals() -> Iterator[None]:
    """Raise errors about the token for people who only have this token."""
    try:
        yield
    except Unauthorized as error:
        expired = "expired" in error.message
        raise Unauthorized(
            error.message if expired else "the token is wrong or was revoked",
            remedy="ask for a new one where you got it",
            **error.details,
        ) from error
