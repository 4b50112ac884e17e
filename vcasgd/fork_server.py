"""Process that has imported modules and runs Python commands in forks of itself.

A fork starts in milliseconds, because it imports nothing again, and it shares the memory of the
modules with all others. :class:`ForkedCommand` is a client.

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
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

#: Bytes of the length in front of a request, and of the exit status in the response.
NUMBER_BYTES = 4
#: Answer of a server that can't fork; larger than any command's exit status.
CANNOT_FORK = 256
#: Seconds until the next connection is accepted after that failed, as it does without descriptors.
ACCEPT_PAUSE_SECONDS = 0.1
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
    thread. Raises :class:`OSError` if the machine has no memory or process number for it.
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


class _Request:
    """A request that arrives. It never waits, because the others would wait, too."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.streams: list[int] = []
        self._left: int | None = None
        self._parts: list[bytes] = []
        connection.setblocking(False)

    def read(self) -> dict[str, Any] | None:
        """Return the request once it is complete. Raises :class:`ValueError`, :class:`OSError`."""
        try:
            if self._left is None:
                size, self.streams, _, _ = socket.recv_fds(self.connection, NUMBER_BYTES, 3)
                if len(self.streams) != 3 or len(size) != NUMBER_BYTES:
                    raise ValueError("not a request")
                self._left = int.from_bytes(size, "little")
            while self._left:
                part = self.connection.recv(min(self._left, 1 << 20))
                if not part:
                    raise ValueError("the request is cut off")
                self._parts.append(part)
                self._left -= len(part)
        except BlockingIOError:
            return None
        request: dict[str, Any] = json.loads(b"".join(self._parts))
        return request

    def close_streams(self) -> None:
        for stream in self.streams:
            os.close(stream)
        self.streams = []


class ForkServer:
    """Serves requests in the main thread of a process that has no other threads.

    ``source`` listens for the connections of clients, or is the end of a pair of sockets over which
    they are passed (:func:`pass_connection`).
    """

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        #: Requests that are not complete, by the number of their connection.
        self._requests: dict[int, _Request] = {}
        self._clients: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._ended, self._wakeup = os.pipe()

    def serve(self) -> None:
        """Serve until the other end of the pair is closed; without a pair, forever.

        A command is killed when its client ends, and its client gets its exit status:
        :data:`CANNOT_FORK` without memory or process numbers for a fork.
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
                    if not self._accept():
                        return
                elif key.fileobj == self._ended:
                    self._reap()
                elif isinstance(key.data, _Request):
                    self._read(key.data)
                else:
                    # The client has ended; it never writes again.
                    self._kill(key.data)

    def _accept(self) -> bool:
        """Take the next connection; return False if there will be none."""
        try:
            if self._source.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection = self._source.accept()[0]
            else:
                sent, passed, _, _ = socket.recv_fds(self._source, 1, 1)
                if not passed:
                    # The number that came along was lost if this process has too many open files.
                    return bool(sent)
                connection = socket.socket(fileno=passed[0])
        except OSError as error:
            sys.stderr.write(f"can't accept a connection: {error}\n")
            time.sleep(ACCEPT_PAUSE_SECONDS)
            return True
        request = _Request(connection)
        self._requests[connection.fileno()] = request
        self._selector.register(connection, selectors.EVENT_READ, request)
        return True

    def _forget(self, request: _Request) -> None:
        del self._requests[request.connection.fileno()]
        self._selector.unregister(request.connection)
        request.close_streams()

    def _read(self, request: _Request) -> None:
        try:
            command = request.read()
            if command is None:
                return
            argv, env, cwd = command["argv"], command["env"], command["cwd"]
        except (OSError, ValueError, LookupError, TypeError):
            self._forget(request)
            request.connection.close()
            return
        self._start(request, argv, env, cwd)

    def _start(
        self, request: _Request, argv: Sequence[str], env: Mapping[str, str], cwd: str
    ) -> None:
        server, streams, connection = os.getpid(), request.streams, request.connection

        def close() -> None:
            self._close_all(besides=request)
            die_with(server)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for stream in streams:
                os.close(stream)

        try:
            pid = fork_python(argv, env, cwd, close=close)
        except OSError as error:
            sys.stderr.write(f"can't fork {' '.join(argv)}: {error}\n")
            self._forget(request)
            _answer(connection, CANNOT_FORK)
            return
        self._forget(request)
        self._clients[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, pid)

    def _close_all(self, besides: _Request) -> None:
        """Close everything in a fork, except the streams of its own request."""
        self._selector.close()
        self._source.close()
        for request in self._requests.values():
            request.connection.close()
            if request is not besides:
                request.close_streams()
        for client in self._clients.values():
            client.close()
        os.close(self._ended)
        os.close(self._wakeup)

    def _kill(self, pid: int) -> None:
        if pid not in self._clients:  # The command has ended at the same time.
            return
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
        _answer(client, status if status >= 0 else 128 - status)


def _answer(client: socket.socket, status: int) -> None:
    """Send the exit status, for which an empty buffer always has room, and end the connection."""
    with contextlib.suppress(OSError), client:
        client.sendall(status.to_bytes(NUMBER_BYTES, "little"))


class ForkedCommand:
    """A command in a fork of a server, with the methods of :class:`subprocess.Popen`.

    It is killed when this process ends.
    """

    def __init__(
        self,
        connection: socket.socket,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        output: IO[bytes],
    ) -> None:
        """Request the command over a connection.

        ``argv`` are the arguments of the interpreter: ``-m module …`` or ``file …``. Raises
        :class:`OSError`.
        """
        self.args = list(argv)
        self.returncode: int | None = None
        self._connection = connection
        request = json.dumps({"argv": self.args, "env": dict(env), "cwd": str(cwd)}).encode()
        size = len(request).to_bytes(NUMBER_BYTES, "little")
        with Path(os.devnull).open("rb") as nothing:
            streams = [nothing.fileno(), output.fileno(), output.fileno()]
            socket.send_fds(connection, [size], streams)
        connection.sendall(request)

    @classmethod
    def at(
        cls, path: Path, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: IO[bytes]
    ) -> ForkedCommand:
        """Request the command from the server at a socket. Raises :class:`OSError`."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
            return cls(connection, argv, env, cwd, output)
        except OSError:
            connection.close()
            raise

    def poll(self) -> int | None:
        """Return the exit status, 1 if the server ended, or None while the command runs.

        :data:`CANNOT_FORK`: the command did not start.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, seconds: float | None = None) -> int:
        """Return the exit status. Raises :class:`subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self._connection.settimeout(seconds)
            try:
                # So few bytes arrive at once.
                answer = self._connection.recv(NUMBER_BYTES)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, seconds or 0.0) from None
            except OSError:
                answer = b""
            self.returncode = int.from_bytes(answer, "little") if answer else 1
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
