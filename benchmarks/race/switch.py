"""Carry packets between TUN devices with the rate and delay of slow links: a program.

    python switch.py HUB DEVICE … --mbit 100 --delay 0.025

Creates the devices, prints ``ready``, and carries packets until its input ends. For each line of
input, it prints the bytes that it has carried. Devices may be moved to other network namespaces.
The hub's link has a delay only. Kernels often lack netem, which does this.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

DEVICE = Path("/dev/net/tun")
#: From linux/if_tun.h.
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
#: Largest IP packet.
PACKET_BYTES = 65_536
#: Seconds that packets wait for a link at most; more are dropped, as by a router.
QUEUE_SECONDS = 0.2
#: Address of the hub, and first of the others; the last byte tells the device.
NETWORK = (10, 77, 0)


@dataclass
class Direction:
    """One direction of a link, with ``rate`` in bytes per second."""

    rate: float
    free_at: float = 0.0

    def carry(self, now: float, size: int) -> float | None:
        """Return when a packet of ``size`` bytes is through; None if the queue is full."""
        start = max(now, self.free_at)
        if start - now > QUEUE_SECONDS:
            return None
        self.free_at = start + size / self.rate
        return self.free_at


@dataclass
class Device:
    """A TUN device, and the link behind it."""

    file: int
    up: Direction
    down: Direction


@dataclass
class Switch:
    """Packets in transit, with ``delay`` in seconds from any device to any other one."""

    devices: dict[int, Device]
    delay: float
    carried: int = 0
    _number: count[int] = field(default_factory=count)
    _in_transit: list[tuple[float, int, Device, bytes]] = field(default_factory=list)
    _arrived: list[tuple[float, int, Device, bytes]] = field(default_factory=list)

    def take(self, now: float, source: Device, packet: bytes) -> None:
        """Take a packet from a device, unless nobody is there or the queue is full."""
        target = self.devices.get(packet[19]) if packet[0] >> 4 == 4 else None
        if target is None or tuple(packet[16:19]) != NETWORK:
            return
        sent = source.up.carry(now, len(packet))
        if sent is not None:
            item = (sent + self.delay, next(self._number), target, packet)
            heapq.heappush(self._in_transit, item)

    def due(self, now: float) -> list[tuple[Device, bytes]]:
        """Return the packets that have arrived, and forget them."""
        while self._in_transit and self._in_transit[0][0] <= now:
            at, number, target, packet = heapq.heappop(self._in_transit)
            received = target.down.carry(at, len(packet))
            if received is not None:
                heapq.heappush(self._arrived, (received, number, target, packet))
        due = []
        while self._arrived and self._arrived[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._arrived)
            self.carried += len(packet)
            due.append((target, packet))
        return due

    def wait(self, now: float) -> float | None:
        """Return the seconds until the next packet is due; None if there is none."""
        heads = [queue[0][0] for queue in (self._in_transit, self._arrived) if queue]
        return max(0.0, min(heads) - now) if heads else None


def open_device(name: str) -> int:
    """Create a TUN device, which lives as long as its file is open."""
    file = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return file


def run(switch: Switch) -> None:
    by_file = {device.file: device for device in switch.devices.values()}
    poll = select.poll()
    for file in (*by_file, sys.stdin.fileno()):
        poll.register(file, select.POLLIN)
    while True:
        wait = switch.wait(time.monotonic())
        ready = poll.poll(None if wait is None else wait * 1000)
        now = time.monotonic()
        for file, _ in ready:
            if file == sys.stdin.fileno():
                if not sys.stdin.readline():
                    return
                print(switch.carried, flush=True)
            else:
                _drain(switch, by_file[file], now)
        for target, packet in switch.due(now):
            _give(target.file, packet)


def _drain(switch: Switch, device: Device, now: float) -> None:
    # A bounded number, so that no device keeps the others waiting.
    for _ in range(64):
        try:
            switch.take(now, device, os.read(device.file, PACKET_BYTES))
        except OSError:
            # None is left, or the device isn't up yet.
            return


def _give(file: int, packet: bytes) -> None:
    try:
        os.write(file, packet)
    except OSError:
        # As on a wire: the receiver is gone, or its queue is full.
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("hub")
    parser.add_argument("devices", nargs="+")
    parser.add_argument("--mbit", type=float, required=True)
    parser.add_argument("--delay", type=float, required=True, help="seconds of one way")
    given = parser.parse_args()
    devices = {}
    for nth, name in enumerate((given.hub, *given.devices)):
        rate = given.mbit * 1e6 / 8 if nth else float("inf")
        devices[nth + 1] = Device(open_device(name), Direction(rate), Direction(rate))
    print("ready", flush=True)
    run(Switch(devices, given.delay))


if __name__ == "__main__":
    main()
