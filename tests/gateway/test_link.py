"""The speed of a link, measured through the real gateway, a slow line, and hostile peers."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.api_harness import running
from support.gateways import RunningGateway, gateway_of
from support.waiting import PATIENCE

from vcasgd.agent.link import UNMEASURED, measure_link, speed_of
from vcasgd.agent.trust import GatewayAddress, JoinToken
from vcasgd.errors import ApiError
from vcasgd.gateway.link import MAX_BYTES, MAX_PER_TOKEN, MAX_SECONDS
from vcasgd.gateway.protocol import ACCEPTED, MAX_LINK_BYTES

#: Bytes per second of a slow line; 4 Mbit/s.
SLOW = 500_000


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    home = tmp_path_factory.mktemp("gateway")
    with running(home) as api, gateway_of(home, api) as gateway:
        api.control.publish({}, {"volunteers": {"position": 0, "provider": "join"}})
        yield gateway


def token(gateway: RunningGateway, name: str) -> str:
    with gateway.api.client() as client:
        return JoinToken.parse(client.create_token(name, "join", pool="volunteers").token).text


class Line:
    """A line of limited speed to a port of this machine, in each direction."""

    def __init__(self, target: int, bytes_per_second: float) -> None:
        self._target = target
        self._rate = bytes_per_second
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.carried = 0
        self._ends: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def close(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for end in self._ends:
            end.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                outer = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [inner, outer]
                for pair in ((inner, outer), (outer, inner)):
                    thread = threading.Thread(target=self._carry, args=pair)
                    thread.start()
                    self._threads.append(thread)

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        began, carried = time.monotonic(), 0
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 12):
                idle = time.monotonic() - began - carried / self._rate
                began += max(0.0, idle)
                other.sendall(data)
                carried += len(data)
                self.carried += len(data)
                time.sleep(max(0.0, began + carried / self._rate - time.monotonic()))
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("took", "round_trip", "speed"),
    [(0.5, 0.1, 80.0), (0.5, 0.0, 64.0), (0.5, 0.49, 640.0), (0.5, 0.7, 640.0)],
)
def test_a_round_trip_does_not_hide_a_transfer(
    took: float, round_trip: float, speed: float
) -> None:
    assert speed_of(4_000_000, took, round_trip) == pytest.approx(speed)


def test_speeds_of_a_slow_line_are_measured_in_both_directions(gateway: RunningGateway) -> None:
    line = Line(gateway.port, SLOW)
    try:
        address = GatewayAddress.of(f"https://127.0.0.1:{line.port}", gateway.pin)
        speed = measure_link(address, token(gateway, "slow"))
    finally:
        line.close()
    assert speed.download_mbps is not None
    assert speed.upload_mbps is not None
    # A busy machine makes a line slower, and never faster.
    assert 1.0 < speed.download_mbps < 8.0
    assert 1.0 < speed.upload_mbps < 8.0
    assert line.carried < 5e6


def test_a_line_that_is_too_slow_has_an_upper_bound(gateway: RunningGateway) -> None:
    line = Line(gateway.port, 5_000)
    try:
        address = GatewayAddress.of(f"https://127.0.0.1:{line.port}", gateway.pin)
        began = time.monotonic()
        speed = measure_link(address, token(gateway, "dial-up"), seconds=2.0)
        assert time.monotonic() - began < 60
    finally:
        line.close()
    assert speed.download_mbps == pytest.approx(0.066, rel=0.1)


def test_a_machine_joins_with_the_speed_that_it_measured(gateway: RunningGateway) -> None:
    speed = measure_link(gateway.address(), token(gateway, "fast"))
    assert speed != UNMEASURED
    assert "Mbit/s down" in str(speed)


# -- hostile machines ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_line",
    [b"down 99999999\n", b"down -1\n", b"down 1e3\n", b"sideways 5\n", b"\n", b"x" * 2_000_000],
)
def test_a_request_beyond_the_limits_ends_the_connection(
    gateway: RunningGateway, request_line: bytes
) -> None:
    name = f"eve-{abs(hash(request_line)) % 10**8}"
    with gateway.connection("link", token(gateway, name)) as (link, answer):
        assert answer == ACCEPTED
        with contextlib.suppress(OSError):
            link.sendall(request_line)
            assert link.recv(100) == b""


def test_bytes_of_a_measurement_are_limited(gateway: RunningGateway) -> None:
    received = 0
    with gateway.connection("link", token(gateway, "greedy")) as (link, _):
        with contextlib.suppress(OSError):
            for _ in range(10):
                link.sendall(f"down {MAX_LINK_BYTES}\n".encode())
        with contextlib.suppress(OSError):
            while data := link.recv(1 << 16):
                received += len(data)
    assert received == MAX_BYTES


@pytest.mark.slow
def test_a_measurement_ends_in_time_and_others_do_not_wait(gateway: RunningGateway) -> None:
    began = time.monotonic()
    with gateway.connection("link", token(gateway, "idle")) as (link, answer):
        assert answer == ACCEPTED
        measure_link(gateway.address(), token(gateway, "other"))
        link.settimeout(PATIENCE)
        assert link.recv(100) == b""
    assert time.monotonic() - began >= MAX_SECONDS - 1


def test_measurements_of_a_token_are_limited(gateway: RunningGateway) -> None:
    text = token(gateway, "often")
    answers = []
    for _ in range(MAX_PER_TOKEN + 1):
        with gateway.connection("link", text) as (link, answer):
            answers.append(answer)
            link.sendall(b"up 0\n")
            link.recv(10)
    assert answers[:MAX_PER_TOKEN] == [ACCEPTED] * MAX_PER_TOKEN
    assert answers[-1] == b"-there are too many measurements of links at the moment\n"
    with pytest.raises(ApiError, match="too many measurements"):
        measure_link(gateway.address(), text)
    assert measure_link(gateway.address(), token(gateway, "seldom")) != UNMEASURED


def test_no_link_is_measured_with_a_wrong_token(gateway: RunningGateway) -> None:
    with pytest.raises(ApiError, match="the token is wrong or was revoked"):
        measure_link(gateway.address(), "x")


# -- hostile gateways ------------------------------------------------------------------------------


def flood(connection: ssl.SSLSocket) -> None:
    while True:
        connection.sendall(b"+" * 65536)


def trickle(connection: ssl.SSLSocket) -> None:
    connection.sendall(ACCEPTED)
    while True:
        time.sleep(0.1)
        connection.sendall(b"x")


def accept_and_wait(connection: ssl.SSLSocket) -> None:
    connection.sendall(ACCEPTED)
    while connection.recv(1 << 16):
        pass


@contextlib.contextmanager
def peer(home: Path, behave: Callable[[ssl.SSLSocket], None]) -> Iterator[int]:
    """Run a server with the gateway's certificate and other manners."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(home / "gateway/certificate.pem", home / "gateway/key.pem")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as tls:
                tls.settimeout(PATIENCE)
                behave(tls)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()


@pytest.mark.parametrize("behave", [flood, trickle, accept_and_wait])
def test_a_hostile_gateway_costs_bounded_time(
    gateway: RunningGateway, behave: Callable[[ssl.SSLSocket], None]
) -> None:
    with peer(gateway.api.home, behave) as port:
        address = GatewayAddress.of(f"https://127.0.0.1:{port}", gateway.pin)
        began = time.monotonic()
        with pytest.raises(ApiError):
            measure_link(address, "some-token", seconds=1.0)
        assert time.monotonic() - began < 30
