"""Process that local machines are forks of.

Local machines are processes of one computer, so they share what they import: a machine starts in
milliseconds, and all of them together need the memory of one.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from vcasgd.child_process import kill
from vcasgd.fork_server import ForkedCommand, ForkServer, pass_connection, preload

#: Prefix of variables that no library reads when it is imported.
OWN_VARIABLES = "VCASGD_"


class MachineTemplate:
    """The process, which ends with its owner.

    It can run commands with the environment ``env``; only variables of vcasgd may differ.
    """

    def __init__(self, imports: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it; its first command waits until it has imported ``imports``."""
        self._made_for = tuple(imports), _read_by_libraries(env)
        self._pair, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *imports],
                env=dict(env),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def fits(self, imports: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return True if it lives and can run commands with these modules and this environment."""
        return self._process.poll() is None and self._made_for == (
            tuple(imports),
            _read_by_libraries(env),
        )

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: BinaryIO
    ) -> ForkedCommand:
        """Start a command. Raises :class:`OSError`."""
        return ForkedCommand(pass_connection(self._pair), argv, env, cwd, output)

    def close(self) -> None:
        """End the process. Machines that run are not affected."""
        self._pair.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        kill(self._process)


def _read_by_libraries(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(OWN_VARIABLES)}


def main() -> None:
    descriptor, *imports = sys.argv[1:]
    pair = socket.socket(fileno=int(descriptor))
    # Machines must not keep it open.
    pair.set_inheritable(False)
    preload(imports)
    ForkServer(pair).serve()


if __name__ == "__main__":
    main()
