"""Machine of an agent: the hours in which it takes part, its processors, memory, and GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import vcasgd
from vcasgd.agent.sandbox import Sandbox
from vcasgd.container_limits import memory_bytes, processors
from vcasgd.errors import SpecError, StackError
from vcasgd.schemas.joining import JoinRequest
from vcasgd.spec.values import parse_duration
from vcasgd.steady_time import boot_time

#: Share of the limit of a silence for which a pause between two looks counts at most.
PAUSE_SHARE = 0.25
_HOURS = re.compile(r"(\d{1,2})(?::(\d\d))?-(\d{1,2})(?::(\d\d))?")
_TIME = re.compile(r"(\d{1,2}):(\d\d)")
_MINUTE = timedelta(minutes=1)


@dataclass(frozen=True)
class Hours:
    """Part of each day, from ``start`` to ``end`` minutes after midnight; it can contain it."""

    start: int
    end: int

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Parse ``22-6`` or ``22:30-6:15``. Raises :class:`SpecError`."""
        match = _HOURS.fullmatch(text.strip())
        if match is not None:
            start = int(match[1]) * 60 + int(match[2] or 0)
            end = int(match[3]) * 60 + int(match[4] or 0)
            minutes = (int(match[2] or 0), int(match[4] or 0))
            if start % 1440 != end % 1440 and max(start, end) <= 1440 and max(minutes) < 60:
                return cls(start % 1440, end % 1440)
        raise SpecError(f"hours: {text} must have the form 22-6 or 22:30-6:15", field="hours")

    def next_start(self, now: datetime) -> datetime:
        """Return ``now`` if it is within these hours, else when they next begin."""
        return now if self._contains(now) else self._next(now, within=True)

    def next_end(self, now: datetime) -> datetime:
        """Return when these hours, which contain ``now``, end."""
        return self._next(now, within=False)

    def _next(self, now: datetime, *, within: bool) -> datetime:
        # Not by arithmetic: in some nights, the local clock skips an hour or repeats one.
        minutes = (now.replace(second=0, microsecond=0) + at * _MINUTE for at in range(1, 3 * 1440))
        return next(at for each in minutes if self._contains(at := each.astimezone()) is within)

    def _contains(self, now: datetime) -> bool:
        minute = _minute_of(now)
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


def _minute_of(now: datetime) -> int:
    return now.hour * 60 + now.minute


@dataclass(frozen=True)
class Availability:
    """Times at which this machine takes part; without limits, always."""

    until: datetime | None = None
    hours: Hours | None = None

    def over(self, now: datetime) -> bool:
        """Return True if it takes part no more."""
        return self.until is not None and self.start(now) >= self.until

    def start(self, now: datetime) -> datetime:
        """Return when it takes part next; ``now`` if it does."""
        return now if self.hours is None else self.hours.next_start(now)

    def end(self, now: datetime) -> datetime | None:
        """Return when the present part ends; None without an end."""
        ends = [self.until, self.hours.next_end(now) if self.hours else None]
        return min((each for each in ends if each is not None), default=None)


class StackSilence:
    """Time since the last answer of the stack, and how long it may be.

    A longer pause between two looks counts for :data:`PAUSE_SHARE` of the limit: the machine was
    frozen or outside of its schedule, and the stack may have been there.
    """

    def __init__(self, limit: timedelta | None = None) -> None:
        self._limit = float("inf") if limit is None else limit.total_seconds()
        self.broken()

    @classmethod
    def parse(cls, text: str | None) -> StackSilence:
        """Parse the limit, such as ``1h``; None means no limit. Raises :class:`SpecError`."""
        return cls(None if text is None else _duration(text, "give-up"))

    def broken(self) -> None:
        """Record an answer."""
        self._seconds, self._looked_at = 0.0, time.monotonic()

    def too_long(self) -> bool:
        """Look again, and return True if the machine should leave."""
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, PAUSE_SHARE * self._limit)
        self._looked_at = now
        return self._seconds > self._limit


def parse_until(text: str, now: datetime) -> datetime:
    """Parse a time (``07:30``, ``2026-01-31T07:30``) or a duration (``8h``).

    Raises :class:`SpecError`.
    """
    text = text.strip()
    match = _TIME.fullmatch(text)
    if match and int(match[1]) < 24 and int(match[2]) < 60:
        end, present = int(match[1]) * 60 + int(match[2]), _minute_of(now)
        return Hours(present if present != end else end + 1, end).next_end(now)
    at: datetime | None = None
    with suppress(ValueError):
        at = now + parse_duration(text)
    with suppress(ValueError):
        at = datetime.fromisoformat(text).astimezone(now.tzinfo)
    if at is None:
        raise SpecError(
            f"until: {text} must be a time such as 07:30 or a duration such as 8h", field="until"
        )
    if at <= now:
        raise SpecError(f"{text} is in the past", field="until")
    return at


def _duration(text: str, option: str) -> timedelta:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise SpecError(str(error), field=option) from error


# -- the last input on terminals and in desktop sessions -------------------------------------------

#: Terminals: of windows and of connections, and of the machine itself.
TERMINALS = ("pts/[0-9]*", "tty[0-9]*")
DESKTOPS = frozenset({"x11", "wayland", "mir"})
#: Seconds between two looks, and the most that logind takes to answer.
LOOK_SECONDS, LOGIND_SECONDS = 5.0, 5.0
_PROPERTIES = ("Type", "Active", "IdleHint", "IdleSinceHint")


class OwnerInput:
    """The last input on this machine, and how long it counts."""

    def __init__(
        self,
        idle: timedelta,
        devices: Path = Path("/dev"),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``idle``: how long an input counts. ``devices`` contains the terminals.

        ``clock``: that of their times, which may jump.
        """
        self._idle = idle.total_seconds()
        self._devices, self._clock = devices, clock
        #: The newest time that was seen, and when that was by :func:`boot_time`.
        self._newest, self._last = 0.0, float("-inf")
        self._looked_at = float("-inf")

    @classmethod
    def parse(cls, text: str) -> OwnerInput:
        """Parse the time, such as ``10m``. Raises :class:`SpecError`."""
        return cls(_duration(text, "when-idle"))

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
            newest = max((0.0, *self._terminals(), *self._desktops()))
            if newest != self._newest:
                age = max(0.0, self._clock() - newest)
                self._newest, self._last = newest, max(self._last, boot_time() - age)
            self._looked_at = time.monotonic()
        return boot_time() - self._last < self._idle

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
            yield from desktop_inputs(_loginctl("show-session", *wanted, *names), self._clock())


def desktop_inputs(shown: str, now: float) -> Iterator[float]:
    """Yield the times of the last input in desktop sessions.

    ``shown`` is the output of ``loginctl show-session``. A desktop tells logind when it is idle and
    when it no longer is; sessions behind that of another user don't count.
    """
    for block in shown.split("\n\n"):
        session = dict(line.partition("=")[::2] for line in block.splitlines())
        if session.get("Type") not in DESKTOPS or session.get("Active") != "yes":
            continue
        since = session.get("IdleSinceHint", "")
        is_idle = session.get("IdleHint") == "yes" and since.isdecimal()
        yield int(since) / 1e6 if is_idle else now


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


@dataclass(frozen=True)
class Terms:
    """Terms under which this machine takes part, which its owner sets.

    ``environment`` has the variables that workers may see.
    """

    schedule: Availability
    owner: OwnerInput | None
    silence: StackSilence
    processors: list[int]
    environment: Mapping[str, str]
    sandbox: Sandbox | None


#: Seconds for the first import of torch on a slow machine.
TORCH_SECONDS = 300.0
_PROGRAM = """
import json, torch
count = torch.cuda.device_count()
name = torch.cuda.get_device_name(0) if count else ""
memory = [torch.cuda.get_device_properties(each).total_memory for each in range(count)]
print(json.dumps([count, name, min(memory, default=0)]))
"""


def usable_processors(limit: int | None) -> list[int]:
    """Return the processors that workers may use: all of this process, or the first ones."""
    available = sorted(os.sched_getaffinity(0))
    return available if limit is None else available[:limit]


def measure(usable: Sequence[int], name: str | None = None) -> JoinRequest:
    """Measure this machine, of which workers may use these processors.

    ``name``: its name, if the stack ordered it. Raises :class:`StackError` if torch can't be used.
    """
    gpus, gpu, gpu_memory = _gpus()
    return JoinRequest(
        version=vcasgd.__version__,
        host=socket.gethostname(),
        cpus=min(float(len(usable)), processors()),
        memory_mb=int(memory_bytes() / 1e6),
        gpus=gpus,
        gpu=gpu[:100],
        gpu_memory_mb=int(gpu_memory / 1e6) or None,
        machine=name,
    )


def _gpus() -> tuple[int, str, int]:
    """Return the number of GPUs, the name of the first one, and the smallest memory in bytes.

    Another process finds out, because torch would stay in the memory of this one.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why_not = f"its import takes more than {TORCH_SECONDS:g} s"
        raise StackError(f"torch can't be used on this machine: {why_not}") from None
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it ended at once"]
        raise StackError(f"torch can't be used on this machine: {why[0]}")
    count, name, memory = json.loads(done.stdout.splitlines()[-1])
    return int(count), str(name), int(memory)
