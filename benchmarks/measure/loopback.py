"""Throughput of a plain TCP stream between two processes of this machine.

One process sends memory repeatedly; another receives it, in pieces of the size that the store
uses. Neither does anything else, so no exchange of updates can be faster. Two sizes of memory are
measured: a single piece, which stays in the processor's cache, and the size of the model, which
an exchange of tensors has to read and write.

The module is also the program of the sender.
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

#: Size of a piece; the store sends chunks of this size.
CHUNK_BYTES = 1 << 20
#: Kernel buffer sizes of sender and receiver; the better pair counts. 0 keeps the kernel's
#: default. Data in a small buffer is still in the processor's cache when it is received.
BUFFER_BYTES = ((0, 0), (1 << 17, 1 << 21))
#: Duration for each pair of buffers and each size of memory.
SECONDS = 0.5
#: Uncounted time for the TCP window to grow.
WARM_UP_SECONDS = 0.1
ANSWER_SECONDS = 10.0


@dataclass(frozen=True)
class Loopback:
    """Throughput in bytes per second.

    ``piece`` uses the same piece of memory each time, ``model`` memory of the model's size.
    """

    piece: float
    model: float


def measure_loopback(model_bytes: int) -> Loopback:
    """Measure the throughput in about three seconds. Raises :class:`StackError`."""
    best = [
        max(_measured(SECONDS, size, *buffers) for buffers in BUFFER_BYTES)
        for size in (CHUNK_BYTES, max(model_bytes, CHUNK_BYTES))
    ]
    return Loopback(*best)


def carried_bytes() -> int:
    """Return the bytes that this machine's loopback interface has carried so far."""
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
                    # A timeout costs an extra system call; the end of the sender unblocks this too.
                    near.settimeout(None)
                    return _receive(near, _pieces(memory), seconds)
            finally:
                sender.terminate()


def _pieces(memory: int) -> Iterator[memoryview]:
    """Cycle through views of all pieces of ``memory`` bytes."""
    # Not zeros: the kernel maps all zero pages to one page.
    whole = memoryview(bytearray(b"x") * memory)
    return cycle([whole[at : at + CHUNK_BYTES] for at in range(0, memory, CHUNK_BYTES)])


def _receive(near: socket.socket, pieces: Iterator[memoryview], seconds: float) -> float:
    """Return bytes per second, counted in whole pieces."""
    count, started = 0, 0.0
    warm_at = time.perf_counter() + WARM_UP_SECONDS
    for piece in pieces:
        rest = piece
        while rest:
            received = near.recv_into(rest)
            if not received:
                raise StackError("the sender of the loopback measurement ended")
            rest = rest[received:]
        now = time.perf_counter()
        if started:
            count += piece.nbytes
            if now > started + seconds:
                return count / (now - started)
        elif now > warm_at:
            started = now
    raise AssertionError("the pieces are endless")


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
            return  # The receiver has finished.


if __name__ == "__main__":
    main()
