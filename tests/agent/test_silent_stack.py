"""A machine that joined, and a stack whose answers never end."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console
from support.http_servers import LocalServer, QuietHandler
from support.waiting import PATIENCE, await_truth

import vcasgd
from vcasgd.agent import agent as agent_module
from vcasgd.agent.agent import NOTICE_SECONDS, Agent, Display, LeaveSignals, Visit
from vcasgd.agent.availability import Availability, StackSilence, Terms
from vcasgd.agent.connection import AgentConnection, GatewayAddress, JoinToken
from vcasgd.errors import ApiError
from vcasgd.schemas.joining import JoinRequest, JoinView, ReportBody


class Stack(QuietHandler):
    """Sends a byte of an answer to each report now and then."""

    server: Server

    def do_POST(self) -> None:
        self.server.asked.set()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        try:
            while not self.server.ended.wait(0.05):
                self.wfile.write(b" ")
        except OSError:
            self.server.hung_up.set()

    def do_DELETE(self) -> None:
        self.answer(204)


class Server(LocalServer):
    """The stack's port."""

    def __init__(self) -> None:
        super().__init__(Stack)
        self.asked, self.ended, self.hung_up = (threading.Event() for _ in range(3))
        tls = ssl.create_default_context()
        self.address = GatewayAddress(self.url, "127.0.0.1", self.port, tls, tls)


@pytest.fixture
def stack() -> Iterator[Server]:
    with Server() as server:
        yield server
        server.ended.set()


def test_an_answer_that_never_ends_is_none(stack: Server) -> None:
    connection = AgentConnection(stack.address, JoinToken("token"), "secret", seconds=0.3)

    def asked() -> bool:
        with pytest.raises(ApiError, match="no complete answer"):
            connection.report(ReportBody(workers={}))
        # On a busy machine, the time may be over before the request was sent.
        return stack.asked.is_set()

    def left() -> bool:
        connection.leave()
        return True

    await_truth(asked)

    assert stack.hung_up.wait(PATIENCE), "the request has ended, too"
    await_truth(left)
    connection.close()


@pytest.mark.timeout(PATIENCE)
def test_a_machine_leaves_in_time_while_its_report_is_not_answered(
    stack: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a machine whose report is not answered, and whose time has ended once it has reported
    connection = AgentConnection(stack.address, JoinToken("token"), "secret", seconds=PATIENCE)
    view = JoinView(machine="m", pool="p", cluster="c", period=0.1, heartbeat=1.0, services=[])
    now, late = agent_module._now, timedelta(seconds=PATIENCE)
    monkeypatch.setattr(agent_module, "_now", lambda: now() + late * stack.asked.is_set())
    end = datetime.now(UTC) + timedelta(seconds=NOTICE_SECONDS) + late
    terms = Terms(Availability(until=end), None, StackSilence(), [0], {}, None)
    display = Display(Console(quiet=True))
    machine = JoinRequest(version=vcasgd.__version__, host="host", cpus=1.0, memory_mb=1000)
    agent = Agent(stack.address, JoinToken("token"), machine, terms, display, LeaveSignals())
    visit = Visit(agent, connection, view, tmp_path)

    # Then it leaves at the end of its time, although the report still waits
    assert visit.run()
    assert stack.asked.is_set()
    connection.close()
