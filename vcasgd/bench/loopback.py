"""What this machine moves through a TCP socket between two processes: the wire's own speed.

One process sends memory over and over, another receives it into memory, in pieces of the size
that the store uses. Nothing else is done with it, so no exchange of updates can be faster. Two
sizes of memory are measured: a single piece, which never leaves the processor's cache, and the
size of the model, which is what an exchange of tensors has to read and write.

Run as a program it is the sender.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from vcasgd.errors import StackError

#: one is what the store sends at a time
CHUNK_BYTES = 1 << 20
#: of the sender's and the receiver's kernel; the better pair counts. 0: the kernel's own choice.
#: What waits in a small buffer is still in the processor's cache when it is received
BUFFER_BYTES = ((0, 0), (1 << 17, 1 << 21))
#: for each pair of buffers and each size of memory
SECONDS = 0.5
#: not counted, for the window of TCP to grow
WARM_UP_SECONDS = 0.1
ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Loopback:
    """Bytes per second. ``piece``: the same piece of memory each time; ``model``: memory of the
    model's size, piece by piece."""

    piece: float
    model: float


def measure_loopback(model_bytes: int) -> Loopback:
    """Takes about three seconds. Raises :class:`StackError`."""
    best = [
        max(_measured(SECONDS, size, *buffers) for buffers in BUFFER_BYTES)
        for size in (CHUNK_BYTES, max(model_bytes, CHUNK_BYTES))
    ]
    return Loopback(*best)


def carried_bytes() -> int:
    """What this machine's loopback interface has carried so far, for whomever."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0


def _measured(seconds: float, memory: int, send_bytes: int, receive_bytes: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(ANSWER_SECONDS)
        _set_buffer(listener, socket.SO_RCVBUF, receive_bytes)
        argv = [sys.executable, "-m", __name__, "--port", str(listener.getsockname()[1]),
                "--buffer", str(send_bytes), "--memory", str(memory)]  # fmt: skip
        with subprocess.Popen(argv) as sender:
            try:
                near, _ = listener.accept()
                with near:
                    # with a time limit Python asks the kernel twice; the sender's end ends it too
                    near.settimeout(None)
                    return _receive(near, _pieces(memory), seconds)
            finally:
                sender.terminate()


def _pieces(memory: int) -> Iterator[memoryview]:
    """Views of all pieces of so many bytes of memory, over and over."""
    # not zeros, which the kernel hands out as one and the same page
    whole = memoryview(bytearray(b"x") * memory)
    return cycle([whole[at : at + CHUNK_BYTES] for at in range(0, memory, CHUNK_BYTES)])


def _receive(near: socket.socket, pieces: Iterator[memoryview], seconds: float) -> float:
    """Bytes per second, in whole pieces."""
    count, begun = 0, 0.0
    warm_at = time.perf_counter() + WARM_UP_SECONDS
    for piece in pieces:
        left = piece
        while left:
            received = near.recv_into(left)
            if not received:
                raise StackError("the sender of the loopback's measurement ended")
            left = left[received:]
        now = time.perf_counter()
        if begun:
            count += piece.nbytes
            if now > begun + seconds:
                return count / (now - begun)
        elif now > warm_at:
            begun = now
    raise AssertionError("pieces come over and over")


def _set_buffer(end: socket.socket, which: int, size: int) -> None:
    if size:
        end.setsockopt(socket.SOL_SOCKET, which, size)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--port", "--buffer", "--memory"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    with socket.create_connection(("127.0.0.1", options.port), ANSWER_SECONDS) as far:
        far.settimeout(None)
        _set_buffer(far, socket.SO_SNDBUF, options.buffer)
        try:
            for piece in _pieces(options.memory):
                far.sendall(piece)
        except OSError:
            return  # the receiver has seen enough


if __name__ == "__main__":
    main()
