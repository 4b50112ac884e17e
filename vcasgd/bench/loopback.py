"""What this machine moves through a TCP socket between two processes: the wire's own speed.

One process sends the same piece of memory over and over, another receives it into the same
piece of memory. Nothing else is done with it, so no exchange of updates can be faster.

Run as a program it is the sender. It imports nothing of ours, so that it starts at once.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time

#: one is what the store sends at a time
CHUNK_BYTES = 1 << 20
#: the kernel's own choice, and two that suit a fast local wire; the best one counts
BUFFER_BYTES = (0, 1 << 20, 4 << 20)
#: not counted, for the window of TCP to grow
WARM_UP_SECONDS = 0.1
ANSWER_SECONDS = 10.0


def loopback_bytes_per_second(seconds: float) -> float:
    """The best of the buffer sizes, each measured for a part of ``seconds``."""
    share = seconds / len(BUFFER_BYTES)
    return max(_measured(share, size) for size in BUFFER_BYTES)


def _measured(seconds: float, buffer_bytes: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(ANSWER_SECONDS)
        _set_buffer(listener, socket.SO_RCVBUF, buffer_bytes)
        port = listener.getsockname()[1]
        argv = [sys.executable, "-I", __file__, "--port", str(port), "--buffer", str(buffer_bytes)]
        with subprocess.Popen(argv) as sender:
            try:
                near, _ = listener.accept()
                with near:
                    near.settimeout(ANSWER_SECONDS)
                    return _receive(near, seconds)
            finally:
                sender.terminate()


def _receive(near: socket.socket, seconds: float) -> float:
    target = memoryview(bytearray(CHUNK_BYTES))
    start = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < start:
        near.recv_into(target)
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) < start + seconds:
        count += near.recv_into(target)
    return count / (now - start)


def _set_buffer(end: socket.socket, which: int, size: int) -> None:
    if size:
        end.setsockopt(socket.SOL_SOCKET, which, size)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--buffer", type=int, required=True)
    options = parser.parse_args()
    source = memoryview(bytes(CHUNK_BYTES))
    with socket.create_connection(("127.0.0.1", options.port), ANSWER_SECONDS) as far:
        _set_buffer(far, socket.SO_SNDBUF, options.buffer)
        try:
            while True:
                far.sendall(source)
        except OSError:
            return  # the receiver has seen enough


if __name__ == "__main__":
    main()
