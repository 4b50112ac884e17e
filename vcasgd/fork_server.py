"""Process that has imported modules and runs Python commands in forks of itself.

A fork starts in milliseconds, because it imports nothing again, and it shares the memory of the
modules with all others. For a request, see :mod:`vcasgd.fork_client`.

A command differs from one in a new interpreter as follows: it can't change settings that its
libraries read when they were imported, and ``/proc/PID/environ`` shows the environment of the
server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vcasgd.fork_client import NUMBER_BYTES

#: Seconds in which a client has to send its request; it does so at once.
REQUEST_SECONDS = 10.0
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
#: Modules that this process imported for its forks; empty in an ordinary process.
_preloaded: tuple[str, ...] = ()


def listen(path: Path) -> socket.socket:
    """Return a listening socket that only the owner of its folder can reach.

    Requests wait until a :class:`ForkServer` serves it. Raises :class:`OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def pass_connection(pair: socket.socket) -> socket.socket:
    """Return a new connection to the server at the other end of a pair. Raises :class:`OSError`."""
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(pair, [b"."], [theirs.fileno()])
    return ours


def preload(modules: Sequence[str]) -> None:
    """Import modules for all forks of this process."""
    global _preloaded
    for name in modules:
        importlib.import_module(name)
    _preloaded = tuple(modules)
    # The collector would write to the memory that all forks share.
    gc.collect()
    gc.freeze()


def preloaded() -> tuple[str, ...]:
    """Return the modules that this process or the server that forked it has imported."""
    return _preloaded


def fork_python(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    *,
    close: Callable[[], None] = lambda: None,
) -> int:
    """Run a Python command in a fork, and return its process number.

    ``argv`` are the arguments of the interpreter: ``-m module …`` or ``file …``. ``close`` is
    called in the fork, to close what the command must not inherit. Call it in a process with one
    thread.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if not pid:
        _run(argv, env, cwd, close)
    return pid


def _run(
    argv: Sequence[str], env: Mapping[str, str], cwd: str, close: Callable[[], None]
) -> NoReturn:
    status = 1
    try:
        close()
        _reset_signals()
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        _reseed()
        _rename(argv)
        status = _status(argv)
    except BaseException:  # noqa: BLE001 - as an interpreter does
        traceback.print_exc()
    finally:
        _exit(status)


def _status(argv: Sequence[str]) -> int:
    try:
        with warnings.catch_warnings():
            # The module may be among those that were imported.
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
            if argv[0] == "-m":
                sys.argv = list(argv[1:])
                runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = list(argv)
                runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _exit(status: int) -> NoReturn:
    """End as an interpreter does: exit handlers run and streams are flushed."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status & 0xFF)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _reseed() -> None:
    """Draw new seeds; a new interpreter does the same."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _rename(argv: Sequence[str]) -> None:
    """Show the command instead of the server's name in ``ps``."""
    name = argv[1] if argv[0] == "-m" else Path(argv[0]).stem
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name[-15:].encode(), 0, 0, 0)


def die_with(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process the signal ``by`` when its ``parent`` ends (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:  # It ended before the call.
        os.kill(os.getpid(), by)


class ForkServer:
    """Serves requests in the main thread of a process that has no other threads.

    ``source`` listens for the connections of clients, or is the end of a pair of sockets over which
    they are passed (:func:`pass_connection`).
    """

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._clients: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._ended, self._wakeup = os.pipe()

    def serve(self) -> None:
        """Serve until the other end of the pair is closed; without a pair, forever.

        A command is killed when its client ends, and its client gets its exit status.
        """
        os.set_blocking(self._ended, False)
        os.set_blocking(self._wakeup, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._source, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._source:
                    connection = self._next_connection()
                    if connection is None:
                        return
                    self._start(connection)
                elif key.fileobj == self._ended:
                    self._reap()
                else:
                    # The client has ended; it never writes again.
                    self._kill(key.data)

    def _next_connection(self) -> socket.socket | None:
        if self._source.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return self._source.accept()[0]
        _, passed, _, _ = socket.recv_fds(self._source, 1, 1)
        return socket.socket(fileno=passed[0]) if passed else None

    def _start(self, connection: socket.socket) -> None:
        try:
            request, streams = _receive(connection)
        except (OSError, ValueError):
            connection.close()
            return
        server = os.getpid()

        def close() -> None:
            self._close_all()
            connection.close()
            die_with(server)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for stream in streams:
                os.close(stream)

        pid = fork_python(request["argv"], request["env"], request["cwd"], close=close)
        for stream in streams:
            os.close(stream)
        self._clients[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)

    def _close_all(self) -> None:
        self._selector.close()
        self._source.close()
        for client in self._clients.values():
            client.close()
        os.close(self._ended)
        os.close(self._wakeup)

    def _kill(self, pid: int) -> None:
        self._selector.unregister(self._clients[pid])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._ended, 1 << 16)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._report(pid, os.waitstatus_to_exitcode(status))

    def _report(self, pid: int, status: int) -> None:
        client = self._clients.pop(pid, None)
        if client is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client)
        # As a shell reports the end by a signal.
        code = status if status >= 0 else 128 - status
        with contextlib.suppress(OSError), client:
            client.sendall(code.to_bytes(NUMBER_BYTES, "little"))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and its standard streams. Raises :class:`ValueError`, :class:`OSError`."""
    connection.settimeout(REQUEST_SECONDS)
    size, streams, _, _ = socket.recv_fds(connection, NUMBER_BYTES, 3)
    if len(streams) != 3 or len(size) != NUMBER_BYTES:
        raise ValueError("not a request")
    left, parts = int.from_bytes(size, "little"), []
    while left:
        part = connection.recv(min(left, 1 << 20))
        if not part:
            raise ValueError("the request is cut off")
        parts.append(part)
        left -= len(part)
    return json.loads(b"".join(parts)), streams
