"""Visitors without a token who hold as many connections as they can, each kind in its way.

Meanwhile, machines join from another address, and the API answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import psutil
import pytest
from support.gateways import MACHINE, RunningGateway, running_gateway
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import ApiError
from vcasgd.gateway.main import Crowd, address_key
from vcasgd.gateway.relay import ACCEPTED
from vcasgd.limits import (
    GATEWAY_BUFFER_BYTES,
    MAX_GATEWAY_VISITORS,
)

#: Seconds in which an honest request is answered.
ANSWER_SECONDS = 2.0
#: Open files of a process by default, as of the API.
USUAL_FILES = 1024
#: Half of the memory that a hundred connections cost without limits on their buffers.
BOUNDED_BYTES = 150 << 20
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    home = tmp_path_factory.mktemp("gateway")
    with running_gateway(home) as gateway:
        process = gateway.api.process.pid
        _, most = resource.prlimit(process, resource.RLIMIT_NOFILE)
        resource.prlimit(process, resource.RLIMIT_NOFILE, (USUAL_FILES, most))
        gateway.publish_pool()
        yield gateway


@pytest.fixture(scope="module")
def idle_bytes(gateway: RunningGateway) -> int:
    """Return the memory of a gateway before any attack."""
    return int(psutil.Process(gateway.process.pid).memory_info().rss)


@dataclass
class Flood:
    """Connections to a gateway from addresses that no honest machine has."""

    gateway: RunningGateway
    held: list[socket.socket] = field(default_factory=list)

    def connect(self, number: int, addresses: int = 1) -> Iterator[socket.socket]:
        for at in range(number):
            source = f"127.7.{at % addresses // 250}.{at % addresses % 250 + 1}"
            plain = socket.create_connection(
                ("127.0.0.1", self.gateway.port), PATIENCE, source_address=(source, 0)
            )
            self.held.append(plain)
            yield plain

    def connect_tls(
        self, number: int, addresses: int = 1, *, guests: bool = False
    ) -> Iterator[ssl.SSLSocket]:
        address = self.gateway.address()
        tls = address.server_tls if guests else address.api_tls
        assert isinstance(tls, ssl.SSLContext)
        for plain in self.connect(number, addresses):
            connection = tls.wrap_socket(plain, server_hostname=address.host)
            self.held[-1] = connection
            yield connection

    @property
    def open(self) -> int:
        """The number of connections that the gateway has not closed."""
        return sum(map(_is_open, self.held))

    def end(self) -> None:
        while self.held:
            self.held.pop().close()


def _is_open(connection: socket.socket) -> bool:
    """Read what has arrived, and return False at the end."""
    connection.setblocking(False)
    try:
        while data := connection.recv(1 << 16):
            del data
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        pass
    return False


@pytest.fixture
def flood(gateway: RunningGateway) -> Iterator[Flood]:
    flood = Flood(gateway)
    yield flood
    flood.end()
    gateway.close_all()


@dataclass(frozen=True)
class Attack:
    """Bytes that a visitor sends on each of its connections before it waits."""

    connections: int
    sent: bytes = b""
    tls: bool = True
    guests: bool = False
    addresses: int = 1

    def __call__(self, flood: Flood) -> None:
        if self.tls:
            held = flood.connect_tls(self.connections, self.addresses, guests=self.guests)
        else:
            held = flood.connect(self.connections, self.addresses)
        for each in held:
            each.sendall(self.sent)


def answers_unread(flood: Flood) -> None:
    with httpx.Client(
        verify=flood.gateway.address().api_tls, trust_env=False, timeout=PATIENCE
    ) as visitor:
        page = visitor.get(flood.gateway.url).text
    (script,) = re.findall(r'src="(/assets/[^"]+)"', page)
    request = REQUEST.replace(b"/healthz", script.encode())
    for each in flood.connect_tls(100):
        each.sendall(request * 10)
    process = psutil.Process(flood.gateway.process.pid)
    await_truth(lambda: process.cpu_percent(0.5) < 5.0)


MANY, MORE = MAX_GATEWAY_VISITORS + 200, USUAL_FILES + 76
ATTACKS: dict[str, Callable[[Flood], None]] = {
    "silent": Attack(MANY, tls=False),
    "idle-tls": Attack(MORE),
    "silent-guests": Attack(600, guests=True),
    "many-addresses": Attack(MANY, REQUEST, addresses=MAX_GATEWAY_VISITORS),
    "answers-unread": answers_unread,
}
MORE_ATTACKS = {
    "slow-handshakes": Attack(MANY, b"\x16\x03\x01\x02", tls=False),
    "begun-requests": Attack(600, REQUEST[:-2]),
    "idle-after-a-request": Attack(MORE, REQUEST),
    "second-requests-begun": Attack(600, REQUEST + REQUEST[:-2]),
}


@pytest.mark.parametrize(
    "name", [*ATTACKS, *(pytest.param(each, marks=pytest.mark.extended) for each in MORE_ATTACKS)]
)
@pytest.mark.ci
def test_a_flood_keeps_nobody_else_out(
    gateway: RunningGateway, idle_bytes: int, flood: Flood, name: str
) -> None:
    attack = {**ATTACKS, **MORE_ATTACKS}[name]
    process = psutil.Process(gateway.process.pid)
    text = gateway.token(name)

    def stands() -> bool:
        flood.end()
        try:
            attack(flood)
        except OSError:
            # The gateway has closed a connection that began late.
            return False
        began = time.monotonic()
        try:
            with gateway.connection("ledger", text) as (_, answer):
                assert answer == ACCEPTED
            served = time.monotonic()
            gateway.machine(text).join(MACHINE)
            joined = time.monotonic()
            with httpx.Client(
                verify=gateway.address().api_tls, trust_env=False, timeout=PATIENCE
            ) as visitor:
                assert visitor.get(f"{gateway.url}/healthz").status_code == 200
            ended = time.monotonic()
        except (OSError, ApiError):
            assert time.monotonic() - began > ANSWER_SECONDS, traceback.format_exc()
            return False
        # directly, for those who don't come through the gateway
        with gateway.api.http() as http:
            assert http.get("jobs").status_code == 200
        assert process.memory_info().rss - idle_bytes < BOUNDED_BYTES
        assert psutil.Process(gateway.api.process.pid).num_fds() < USUAL_FILES // 2 + 50
        in_time = max(served - began, joined - served, ended - joined) < ANSWER_SECONDS
        return in_time and flood.open > 0

    # On a busy machine, it may take long, and then the connections are not held any more.
    await_truth(stands)


@pytest.mark.slow
def test_connections_that_do_not_begin_are_closed(flood: Flood) -> None:
    # Given one connection of each kind that could be held before a token is known
    def all_open() -> bool:
        flood.end()
        assert all(flood.connect(1))
        assert all(flood.connect_tls(1))
        assert all(flood.connect_tls(1, guests=True))
        for each in flood.connect_tls(1):
            each.sendall(REQUEST[:-2])
        return flood.open == 4

    await_truth(all_open)

    # Then a byte now and then doesn't make them last longer
    def all_closed() -> bool:
        with contextlib.suppress(OSError):
            flood.held[-1].sendall(b"x")
        return not flood.open

    await_truth(all_closed, interval=0.2)


def test_connections_of_a_token_make_room_for_its_new_ones() -> None:
    """The same for all keys, so small numbers show what a token gets."""

    async def hold(crowd: Crowd, key: str, begun: list[str], name: str) -> None:
        with crowd.member(key):
            begun.append(name)
            await asyncio.Event().wait()

    async def scenario() -> list[str]:
        crowd, begun = Crowd(limit=4, limit_of_key=2), list[str]()
        keys = {"a1": "a", "b1": "b", "a2": "a", "a3": "a", "b2": "b", "c1": "c"}
        tasks = {}
        for name, key in keys.items():
            tasks[name] = asyncio.create_task(hold(crowd, key, begun, name))
            await asyncio.sleep(0)
        assert begun == list(keys)
        await asyncio.sleep(0)
        ended = [name for name, task in tasks.items() if task.done()]
        assert crowd.dropped == len(ended)
        assert [crowd.keep(left) for left in ({"b", "c"}, {"c"}, set())] == [1, 2, 1]
        await asyncio.wait(tasks.values())
        assert not crowd.keep(set())
        return ended

    # a1 for a third one of its key; a2 for a fifth one, as one of those that have the most
    assert asyncio.run(scenario()) == ["a1", "a2"]


def test_a_head_that_is_too_long_ends_its_connection(flood: Flood) -> None:
    for each in flood.connect_tls(1):
        with contextlib.suppress(OSError):
            each.sendall(REQUEST[:-2] + b"X: " + b"x" * 3 * GATEWAY_BUFFER_BYTES)
    await_truth(lambda: not flood.open)


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
    ],
)
def test_addresses_that_one_visitor_can_choose_count_as_one(address: str, key: str) -> None:
    assert address_key(address) == key
