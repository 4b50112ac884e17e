"""A network namespace whose processes reach one TCP port of this machine, and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000


class OnePort:
    """The namespace has a loopback interface only. ``port`` there leads to ``target`` here."""

    def __init__(self, target: int) -> None:
        self._target = target
        # it keeps the namespace
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "up\n":
            self._holder.wait()
            pytest.skip("no network namespace can be created here")
        self._namespace = Path(f"/proc/{self._holder.pid}/ns/net")
        self._listener = self._listen()
        self.port: int = self._listener.getsockname()[1]
        #: Connections that were passed on.
        self.connections = 0
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def command(self, argv: list[str]) -> list[str]:
        """Return the command that runs another one in the namespace."""
        return ["nsenter", f"--net={self._namespace}", *argv]

    def close(self) -> None:
        # ends the call of accept
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._holder.kill()
        assert self._holder.stdout is not None
        self._holder.stdout.close()
        self._holder.wait()

    def _listen(self) -> socket.socket:
        """Return a socket of the namespace: it belongs to that of the thread which opens it."""
        opened: list[socket.socket] = []

        def listen() -> None:
            with self._namespace.open() as namespace:
                result = ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET)
                assert result == 0, os.strerror(ctypes.get_errno())
            opened.append(socket.create_server(("127.0.0.1", 0)))

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        return opened[0]

    def _serve(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=_connect, args=(inner, self._target))
            thread.start()
            self._threads.append(thread)


def _connect(inner: socket.socket, target: int) -> None:
    with inner, socket.create_connection(("127.0.0.1", target)) as outer:
        back = threading.Thread(target=_pass_on, args=(outer, inner))
        back.start()
        _pass_on(inner, outer)
        back.join()


def _pass_on(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for each in (one, other):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def one_port(target: int) -> Iterator[OnePort]:
    """Create a namespace, or skip the test if this user may not, or lacks the programs."""
    if os.geteuid() != 0:
        pytest.skip("only root can create a network namespace")
    if missing := [each for each in ("unshare", "nsenter", "ip") if shutil.which(each) is None]:
        pytest.skip(f"programs are missing: {', '.join(missing)}")
    namespace = OnePort(target)
    try:
        yield namespace
    finally:
        namespace.close()
