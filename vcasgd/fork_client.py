"""Run a Python command in a fork of a :class:`~vcasgd.fork_server.ForkServer`.

    python -I -S fork_client.py SOCKET COMMAND…

This process stands for the command: both end when one of them does, with the same exit status.
Without a server, or if that can't fork, it becomes a new interpreter. Imports little, because it
starts in front of every worker.
"""

import array
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence

#: Bytes of the length in front of a request, and of the exit status in the response.
NUMBER_BYTES = 4
#: Answer of a server that can't fork; larger than any command's exit status.
CANNOT_FORK = 256


def send(
    connection: socket.socket,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    streams: Sequence[int],
) -> None:
    """Request a command over a connection, on which its exit status will arrive.

    ``argv`` are the arguments of the interpreter: ``-m module …`` or ``file …``. ``streams`` are
    its standard input, output, and error. Raises :class:`OSError`.
    """
    request = json.dumps({"argv": list(argv), "env": dict(env), "cwd": cwd}).encode()
    size = len(request).to_bytes(NUMBER_BYTES, "little")
    ancillary = array.array("i", streams)
    connection.sendmsg([size], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, ancillary)])
    connection.sendall(request)


def exit_status(connection: socket.socket) -> int:
    """Wait for the end of the command; return its exit status, or 1 if the server ended.

    :data:`CANNOT_FORK`: the command did not start.
    """
    try:
        answer = connection.recv(NUMBER_BYTES, socket.MSG_WAITALL)
    except OSError:
        return 1
    return int.from_bytes(answer, "little") if len(answer) == NUMBER_BYTES else 1


def main() -> None:
    path, *argv = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
        # No pathlib, which takes longer to import than everything else here.
        send(connection, argv, os.environ, os.getcwd(), [0, 1, 2])  # noqa: PTH109
    except OSError:
        status = CANNOT_FORK
    else:
        status = exit_status(connection)
    if status == CANNOT_FORK:
        os.execv(sys.executable, [sys.executable, *argv])
    os._exit(status)


if __name__ == "__main__":
    main()
