"""A name service that a test can switch off, for single processes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from support.missing import skip_here


class NameService:
    """Files that replace ``/etc/hosts`` and ``/etc/resolv.conf`` in a mount namespace of a process.

    Skips the test without the right to create one, but not in CI.
    """

    #: Resolves to this computer while the names are published; no name server answers.
    NAME = "store.vcasgd.test"

    def __init__(self, folder: Path) -> None:
        self._hosts, resolver = folder / "hosts", folder / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        self.publish()
        script = (
            f"mount --bind {self._hosts} /etc/hosts && "
            f'mount --bind {resolver} /etc/resolv.conf && exec "$@"'
        )
        #: The command that runs another one with these files.
        self.under = ["unshare", "--mount", "sh", "-c", script, "sh"]
        if reason := self._obstacle():
            skip_here(reason)

    def publish(self) -> None:
        self._hosts.write_text(f"127.0.0.1 localhost {self.NAME}\n")

    def fail(self) -> None:
        """Make all names but ``localhost`` unknown."""
        self._hosts.write_text("127.0.0.1 localhost\n")

    def _obstacle(self) -> str | None:
        if shutil.which("unshare") is None:
            return "unshare is not installed (Debian: apt install util-linux)"
        done = subprocess.run([*self.under, "true"], capture_output=True, text=True, check=False)
        return f"no mount namespaces: {done.stderr}" if done.returncode else None
