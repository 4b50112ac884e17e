"""Speed of the link to a gateway, measured with a bounded number of bytes."""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass

from vcasgd.agent.trust import CONNECT_SECONDS, GatewayAddress
from vcasgd.errors import ApiError
from vcasgd.gateway.protocol import ACCEPTED, LINK, MAX_LINE_LENGTH, MAX_LINK_BYTES, first_line

#: Seconds for one direction.
SECONDS = 6.0
#: A transfer that takes this long says enough, because connections and buffers are filled by then.
ENOUGH_SECONDS = 0.5
#: Bytes of the first transfer, and the factor between two.
FIRST_BYTES, FACTOR = 1 << 14, 4
_PIECE = bytes(1 << 16)


@dataclass(frozen=True)
class LinkSpeed:
    """Speeds in Mbit/s; None if they are unknown."""

    download_mbps: float | None = None
    upload_mbps: float | None = None

    def __str__(self) -> str:
        if self.download_mbps is None or self.upload_mbps is None:
            return "link not measured"
        return f"{self.download_mbps:.3g} Mbit/s down, {self.upload_mbps:.3g} up"


UNMEASURED = LinkSpeed()


def measure_link(gateway: GatewayAddress, token: str, seconds: float = SECONDS) -> LinkSpeed:
    """Measure both directions, each within ``seconds`` and with 6 MB at most.

    A speed is an upper bound if the link is so slow that the first transfer does not end in time.
    Raises :class:`ApiError` if the gateway doesn't answer, or refuses.
    """
    try:
        return LinkSpeed(
            download_mbps=_measured(gateway, token, "down", seconds),
            upload_mbps=_measured(gateway, token, "up", seconds),
        )
    except OSError as error:
        raise ApiError(f"no answer from {gateway.host} port {gateway.port}: {error}") from error


def _measured(gateway: GatewayAddress, token: str, direction: str, seconds: float) -> float:
    """Return the speed in one direction, in Mbit/s."""
    with _Probe(gateway, token, seconds) as probe:
        round_trip = min(probe.transfer("up", 0) for _ in range(2))
        size, speed = FIRST_BYTES, None
        while True:
            try:
                took = probe.transfer(direction, size)
            except TimeoutError:
                # The transfer before was shorter, and says more than none.
                return speed or size * 8e-6 / seconds
            speed = speed_of(size, took, round_trip)
            if took >= ENOUGH_SECONDS or size >= MAX_LINK_BYTES:
                return speed
            size = min(size * FACTOR, MAX_LINK_BYTES)


def speed_of(size: int, took: float, round_trip: float) -> float:
    """Return the Mbit/s of a transfer of ``size`` bytes, which ``took`` so many seconds.

    On a busy machine, the round trips that were measured before may be longer than the transfer. So
    a tenth of its time always counts.
    """
    return size * 8e-6 / max(took - round_trip, took / 10)


class _Probe:
    """Connection to the gateway's measurements. It ends after ``seconds``, whatever arrives."""

    def __init__(self, gateway: GatewayAddress, token: str, seconds: float) -> None:
        plain = socket.create_connection((gateway.host, gateway.port), CONNECT_SECONDS)
        try:
            self._tls: ssl.SSLSocket = gateway.server_tls.wrap_socket(
                plain, server_hostname=gateway.host
            )
        except OSError:
            plain.close()
            raise
        self._end = time.monotonic() + CONNECT_SECONDS
        try:
            self._send(first_line(LINK, token))
            answer = self._line()
        except OSError:
            self._tls.close()
            raise
        if answer != ACCEPTED:
            self._tls.close()
            text = answer.decode(errors="replace").strip().lstrip("-")
            raise ApiError(text or "the gateway closed the connection")
        self._end = time.monotonic() + seconds

    def __enter__(self) -> _Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._tls.close()

    def transfer(self, direction: str, size: int) -> float:
        """Send or receive ``size`` bytes; return the seconds. Raises :class:`OSError`."""
        began = time.perf_counter()
        self._send(f"{direction} {size}\n".encode())
        if direction == "down":
            while size:
                size -= len(self._receive(min(size, len(_PIECE))))
        else:
            for at in range(0, size, len(_PIECE)):
                self._send(_PIECE[: size - at])
            if (answer := self._line()) != ACCEPTED:
                raise ConnectionError(f"unexpected answer {answer!r:.40}")
        return time.perf_counter() - began

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and len(line) < MAX_LINE_LENGTH:
            line += self._receive(1)
        return line

    def _send(self, data: bytes) -> None:
        self._limit()
        self._tls.sendall(data)

    def _receive(self, most: int) -> bytes:
        self._limit()
        if not (data := self._tls.recv(most)):
            raise ConnectionError("it closed the connection")
        return data

    def _limit(self) -> None:
        """Let the next call wait until the end of the measurement only."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time of the measurement has ended")
        self._tls.settimeout(left)
