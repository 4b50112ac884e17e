"""When somebody last used this machine: input on its terminals and in its desktop sessions."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

from vcasgd.errors import SpecError
from vcasgd.spec.duration import parse_duration

#: Terminals: of windows and of connections, and of the machine itself.
TERMINALS = ("pts/[0-9]*", "tty[0-9]*")
DESKTOPS = frozenset({"x11", "wayland", "mir"})
#: Seconds between two looks, and the most that logind takes to answer.
LOOK_SECONDS, LOGIND_SECONDS = 5.0, 5.0
_PROPERTIES = ("Type", "Active", "IdleHint", "IdleSinceHint")


class OwnerInput:
    """The last input on this machine, and how long it counts."""

    def __init__(self, idle: timedelta, devices: Path = Path("/dev")) -> None:
        """``idle``: how long an input counts. ``devices`` contains the terminals."""
        self._idle = idle.total_seconds()
        self._devices = devices
        self._last = 0.0
        self._looked_at = float("-inf")

    @classmethod
    def parse(cls, text: str) -> OwnerInput:
        """Parse the time, such as ``10m``. Raises :class:`SpecError`."""
        try:
            return cls(parse_duration(text))
        except ValueError as error:
            raise SpecError(str(error), field="when-idle") from error

    def __str__(self) -> str:
        seen = "terminals and desktops" if shutil.which("loginctl") else "terminals"
        return (
            f"takes part after {timedelta(seconds=self._idle)} without input on the {seen} of this "
            "machine"
        )

    @property
    def is_recent(self) -> bool:
        """True if the last input still counts."""
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._last = max((self._last, *self._terminals(), *self._desktops()))
            self._looked_at = time.monotonic()
        return time.time() - self._last < self._idle

    def _terminals(self) -> Iterator[float]:
        """Yield the time of each terminal's last input, as w(1) does."""
        for pattern in TERMINALS:
            for path in self._devices.glob(pattern):
                try:
                    yield path.stat().st_atime
                except OSError:
                    continue  # It was closed just now.

    def _desktops(self) -> Iterator[float]:
        listed = _loginctl("list-sessions", "--no-legend")
        names = [line.split()[0] for line in listed.splitlines() if line.strip()]
        if names:
            wanted = [part for name in _PROPERTIES for part in ("--property", name)]
            yield from desktop_inputs(_loginctl("show-session", *wanted, *names), time.time())


def desktop_inputs(shown: str, now: float) -> Iterator[float]:
    """Yield the times of the last input in desktop sessions.

    ``shown`` is the output of ``loginctl show-session``. A desktop tells logind when it is idle and
    when it no longer is; sessions behind that of another user don't count.
    """
    for block in shown.split("\n\n"):
        session = dict(_pairs(block.splitlines()))
        if session.get("Type") not in DESKTOPS or session.get("Active") != "yes":
            continue
        since = session.get("IdleSinceHint", "")
        is_idle = session.get("IdleHint") == "yes" and since.isdecimal()
        yield int(since) / 1e6 if is_idle else now


def _pairs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        name, _, value = line.partition("=")
        yield name, value


def _loginctl(*arguments: str) -> str:
    """Return what loginctl prints; nothing on a machine without logind."""
    try:
        done = subprocess.run(
            ["loginctl", "--no-pager", *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=LOGIND_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
