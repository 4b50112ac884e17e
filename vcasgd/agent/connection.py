"""Requests of an agent to the API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import vcasgd
from vcasgd.agent.machine import ThisMachine
from vcasgd.agent.trust import GatewayAddress, JoinToken
from vcasgd.client.transport import FILE_SECONDS, Transport, path_of
from vcasgd.errors import ApiError, Unauthorized
from vcasgd.schemas.machines import (
    MACHINE_SECRET,
    JoinRequest,
    JoinView,
    OrderView,
    ReportBody,
    ReportView,
)
from vcasgd.task.package import unpack
from vcasgd.threads import DaemonThreads

#: Seconds for each part of an answer, and for all of it: one that never ends holds nobody up.
ANSWER_SECONDS, WHOLE_ANSWER_SECONDS = 10.0, 30.0

Result = TypeVar("Result")


class AgentConnection:
    """Connection to the API. Methods raise :class:`~vcasgd.errors.ApiError`.

    All but :meth:`fetch_code` return within ``seconds``.
    """

    def __init__(
        self,
        gateway: GatewayAddress,
        token: JoinToken,
        secret: str,
        seconds: float = WHOLE_ANSWER_SECONDS,
    ) -> None:
        """``secret``: random text that shows requests of this machine."""
        self._gateway = gateway
        self._token = token
        self._secret = secret
        self._seconds = seconds
        self._api = self._new_transport()
        # A report may be in progress when the machine leaves.
        self._threads = DaemonThreads(2, "api")
        self._machine = ""

    def _new_transport(self) -> Transport:
        return Transport(
            self._gateway.url,
            self._token.text,
            ANSWER_SECONDS,
            tls=self._gateway.api_tls,
            headers={MACHINE_SECRET: self._secret},
        )

    def _limited(self, call: Callable[[Transport], Result]) -> Result:
        """Return the result of a call. Raises :class:`ApiError` if it takes too long."""
        future = self._threads.submit(call, self._api)
        try:
            result: Result = future.result(self._seconds)
        except TimeoutError as error:
            # The call ends with its connection.
            self._api.close()
            self._api = self._new_transport()
            raise ApiError(
                f"no complete answer from {self._gateway.url} within {self._seconds:g} s"
            ) from error
        return result

    def close(self) -> None:
        """Close all connections."""
        self._api.close()

    def join(self, machine: ThisMachine) -> JoinView:
        """Join. Raises :class:`~vcasgd.errors.Conflict` with the reason if that isn't possible."""
        body = JoinRequest(version=vcasgd.__version__, **vars(machine))
        # Fields without a value are left out, so that an older stack can answer that it is older.
        with _clear_refusals():
            fields = body.model_dump(exclude_none=True)
            view = self._limited(lambda api: api.post(JoinView, "join", fields))
        self._machine = view.machine
        return view

    def report(self, body: ReportBody) -> ReportView:
        """Report the state of the machine.

        Raises :class:`~vcasgd.errors.NotFound` if the machine was removed.
        """
        path = path_of("machines", self._machine, "report")
        with _clear_refusals():
            return self._limited(lambda api: api.post(ReportView, path, body.model_dump()))

    def fetch_code(self, order: OrderView, into: Path, limit_bytes: int | None = None) -> None:
        """Fetch and unpack the code of a job, of up to ``limit_bytes``.

        Raises :class:`~vcasgd.errors.PackageError`.
        """
        if (into / order.package).is_dir():
            return
        path = path_of("machines", self._machine, "packages", order.package)
        # Over a connection of its own, which isn't closed by the others.
        with closing(self._new_transport()) as api:
            response = api.call("GET", path, timeout=FILE_SECONDS)
        unpack(response.content, order.package, into, limit_bytes)

    def leave(self) -> None:
        """Leave."""
        self._limited(lambda api: api.call("DELETE", path_of("machines", self._machine)))


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
