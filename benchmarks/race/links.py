"""Machines behind slow links: each is a network namespace, and a switch carries their packets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from switch import NETWORK

SWITCH = Path(__file__).resolve().parent / "switch.py"
#: Large packets, because each costs the switch processor time.
MTU = 9000
#: Machines that a run may start, one after the other.
MACHINES = 12
HUB, PREFIX = "hub", "link"
LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class LinkSpeed:
    """Rate of each machine's link in both directions, and the time from one machine to another."""

    mbit: float
    delay_ms: float


class Place:
    """Network of a machine: by default that of this run."""

    address = LOCAL

    def command(self, argv: list[str]) -> list[str]:
        """Return the command that runs another one there."""
        return argv


class _Namespace(Place):
    """A network whose only link leads to the switch. Its host's name is the address.

    Some programs bind to the address of the host's name.
    """

    def __init__(self, device: str, number: int, resources: ExitStack) -> None:
        self.address = _address(number)
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", "echo up && exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        resources.callback(_end, self._holder)
        assert self._holder.stdout is not None
        # Until then, it is in this namespace.
        self._holder.stdout.readline()
        _run("ip", "link", "set", device, "netns", str(self._holder.pid))
        for argv in (["hostname", self.address], ["ip", "link", "set", "lo", "up"]):
            _run(*self.command(argv))
        _up(device, self.address, self.command)

    def command(self, argv: list[str]) -> list[str]:
        return ["nsenter", f"--target={self._holder.pid}", "--net", "--uts", *argv]


class Links:
    """Slow links of the machines of a run, whose own network is the hub of the star.

    Needs the right to change this network. :meth:`close` ends all processes of it.
    """

    def __init__(self, speed: LinkSpeed) -> None:
        self._used = 0
        names = [f"{PREFIX}{nth}" for nth in range(MACHINES)]
        with ExitStack() as resources:
            self._switch = subprocess.Popen(
                [sys.executable, str(SWITCH), HUB, *names,
                 "--mbit", str(speed.mbit), "--delay", str(speed.delay_ms / 1000)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            resources.callback(_end, self._switch)
            if self._answer() != "ready":
                raise OSError("the switch of the slow links didn't start; its message is above")
            _up(HUB, self.hub, lambda argv: argv)
            self._resources = resources.pop_all()

    @property
    def hub(self) -> str:
        """Address of this run's own network, whose link has a delay only."""
        return _address(0)

    def place(self) -> Place:
        """Return the place of the next machine."""
        if self._used == MACHINES:
            raise RuntimeError(f"a run with slow links can't start more than {MACHINES} machines")
        self._used += 1
        return _Namespace(f"{PREFIX}{self._used - 1}", self._used, self._resources)

    def carried(self) -> int:
        """Return the bytes of all packets that have arrived."""
        assert self._switch.stdin is not None
        self._switch.stdin.write("\n")
        self._switch.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        self._resources.close()

    def _answer(self) -> str:
        assert self._switch.stdout is not None
        return self._switch.stdout.readline().strip()


def _address(number: int) -> str:
    return ".".join(map(str, (*NETWORK, number + 1)))


def _up(device: str, address: str, command: Callable[[list[str]], list[str]]) -> None:
    _run(*command(["ip", "addr", "add", f"{address}/24", "dev", device]))
    _run(*command(["ip", "link", "set", device, "up", "mtu", str(MTU)]))


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def _end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
