"""Network that loses all packets between one machine and one server, in one direction or both.

Linux runs a filter (BPF) on each packet to and from the sockets of a control group. The machine's
processes are in a group of their own, so no other machine is affected. A filter ends with the
process that attached it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from vcasgd.chaos.faults import FIRE_SECONDS, POLL_SECONDS, await_fault, check_lasted
from vcasgd.chaos.scenario import Direction, OneWay
from vcasgd.errors import StackError

# Numbers of bpf(2), by architecture, and of its commands and types; see linux/bpf.h.
_SYSTEM_CALLS = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE, _MAP_LOOKUP, _PROGRAM_LOAD, _LINK_CREATE = 0, 1, 5, 28
_ARRAY, _CGROUP_SOCKETS = 2, 8
_ATTACH_TYPES: dict[OneWay, int] = {"to-worker": 0, "to-server": 1}
#: Offset of ``remote_port`` in ``struct __sk_buff``.
_REMOTE_PORT = 132


class ControlGroup:
    """Control group for the processes of one machine.

    A socket belongs to the group in which its process was when it opened the socket, so a machine
    has to be taken before it connects to a server. Raises :class:`~vcasgd.errors.StackError`
    without the right to create a group.
    """

    def __init__(self) -> None:
        self._parent = _own_group()
        self.path = self._parent / f"vcasgd-chaos-{os.getpid()}-{time.monotonic_ns()}"
        try:
            self.path.mkdir()
        except OSError as error:
            raise _not_allowed(error) from error

    def take(self, processes: Iterable[int]) -> None:
        """Move processes into the group. Their later children are in it, too."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                (self.path / "cgroup.procs").write_text(str(process))

    def processes(self) -> set[int]:
        """Return the numbers of the living processes in the group."""
        return {int(line) for line in (self.path / "cgroup.procs").read_text().split()}

    def close(self) -> None:
        """Move the processes back, and remove the group."""
        deadline = time.monotonic() + FIRE_SECONDS
        while True:
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    (self._parent / "cgroup.procs").write_text(str(process))
            try:
                self.path.rmdir()
            except OSError:  # A process was forked, or is a zombie.
                if time.monotonic() > deadline:
                    return
                time.sleep(POLL_SECONDS)
            else:
                return


@contextmanager
def packet_loss(
    name: str, group: ControlGroup, port: int, direction: Direction
) -> Iterator[Callable[[], int]]:
    """Lose all packets in a direction between a group's processes and a server.

    Gives a function that returns the number of lost packets.
    """
    directions: tuple[OneWay, ...] = (
        ("to-server", "to-worker") if direction == "both" else (direction,)
    )
    with contextlib.ExitStack() as attached:
        filters = [
            attached.enter_context(closing(PacketFilter(group, port, one))) for one in directions
        ]

        def dropped() -> int:
            return sum(each.dropped() for each in filters)

        await_fault(dropped, f"no packet of {name} was dropped")
        yield dropped
        lasted = bool(group.processes())
    check_lasted(lasted, f"the machine before {name} was lost")


class PacketFilter:
    """Filter that drops and counts a group's packets to or from a port of a server.

    Raises :class:`~vcasgd.errors.StackError` without the right to attach it.
    """

    def __init__(self, group: ControlGroup, port: int, direction: OneWay) -> None:
        attach_type = _ATTACH_TYPES[direction]
        with contextlib.ExitStack() as opened:

            def keep(descriptor: int) -> int:
                opened.callback(os.close, descriptor)
                return descriptor

            try:
                # One counter of 64 bits under the key 0.
                self._counter = keep(_bpf(_MAP_CREATE, "IIIII", _ARRAY, 4, 8, 1, 0))
                program = keep(_load(_instructions(port, self._counter), attach_type))
                folder = keep(os.open(group.path, os.O_RDONLY))
                keep(_bpf(_LINK_CREATE, "IIII", program, folder, attach_type, 0))
            except OSError as error:
                raise _not_allowed(error) from error
            self._opened = opened.pop_all()

    def dropped(self) -> int:
        key, value = ctypes.c_uint32(0), ctypes.c_uint64(0)
        addresses = ctypes.addressof(key), ctypes.addressof(value)
        _bpf(_MAP_LOOKUP, "I4xQQQ", self._counter, *addresses, 0)
        return value.value

    def close(self) -> None:
        """Let packets pass again."""
        self._opened.close()


def _instructions(port: int, counter: int) -> bytes:
    """Return a program that drops and counts packets from or to a port, and lets others pass."""
    (in_network_order,) = struct.unpack("=i", struct.pack("=I", socket.htonl(port)))
    rows = [
        # code, registers (source and destination), offset, value
        (0x61, 0x16, _REMOTE_PORT, 0),  # r6 = packet.remote_port
        (0x56, 0x06, 11, in_network_order),  # if r6 != port: let it pass
        (0x62, 0x0A, -4, 0),  # key = 0, on the stack
        (0xBF, 0xA2, 0, 0),  # r2 = address of the stack
        (0x07, 0x02, 0, -4),  # r2 -= 4, the key
        (0x18, 0x11, 0, counter),  # r1 = the map; takes two rows
        (0x00, 0x00, 0, 0),
        (0x85, 0x00, 0, 1),  # r0 = address of map[key]
        (0x15, 0x00, 2, 0),  # if there is none: drop
        (0xB7, 0x01, 0, 1),  # r1 = 1
        (0xDB, 0x10, 0, 0),  # *r0 += r1, atomically
        (0xB7, 0x00, 0, 0),  # drop: return 0
        (0x95, 0x00, 0, 0),
        (0xB7, 0x00, 0, 1),  # let it pass: return 1
        (0x95, 0x00, 0, 0),
    ]
    return b"".join(struct.pack("=BBhi", *row) for row in rows)


def _load(instructions: bytes, attach_type: int) -> int:
    program, license_ = (ctypes.create_string_buffer(each) for each in (instructions, b"Apache"))
    return _bpf(
        _PROGRAM_LOAD,
        "IIQQIIQII16sII",
        _CGROUP_SOCKETS,
        len(instructions) // 8,
        ctypes.addressof(program),
        ctypes.addressof(license_),
        *(0, 0, 0),  # no log of the verifier
        *(0, 0, b"vcasgd_chaos", 0),
        attach_type,
    )


def _bpf(command: int, layout: str, *values: int | bytes) -> int:
    """Call bpf(2) and return its result. Raises :class:`OSError`."""
    number = _SYSTEM_CALLS.get(platform.machine())
    if number is None:
        raise OSError(f"packet filters are not supported on {platform.machine()}")
    attributes = ctypes.create_string_buffer(struct.pack(f"={layout}", *values))
    size = ctypes.sizeof(attributes) - 1  # without the terminating zero
    result = ctypes.CDLL(None, use_errno=True).syscall(number, command, attributes, size)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def _own_group() -> Path:
    """Return the control group of this process. Raises :class:`StackError` without version 2."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    paths = [path for _, path, kind, *_ in mounts if kind == "cgroup2"]
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    if not paths or not own:
        raise _not_allowed("control groups of version 2 are not mounted")
    return Path(paths[0]) / own[0]


def _not_allowed(reason: object) -> StackError:
    return StackError(
        f"drop needs the right to create control groups and attach packet filters: {reason}",
        remedy="run as root on Linux 5.7 or newer, with control groups of version 2",
    )
