"""Update of this installation to the version of a stack.

The stack only names a version. The code comes from the package index that the owner of the machine
configured for pip, and only a newer final release is installed. So a hostile stack can't choose the
code, and can't bring back a version with known errors.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from packaging.version import InvalidVersion, Version

import vcasgd
from vcasgd.child_process import kill
from vcasgd.errors import ApiError, VcasgdError, VersionDiffers
from vcasgd.file_lock import hold_lock
from vcasgd.logging import last_lines

#: Seconds for pip. A new version may need another torch, which is gigabytes on a slow line.
PIP_SECONDS = 3600.0
#: Seconds for pip to undo what it has begun.
UNDO_SECONDS = 30.0
#: Seconds for the first start of a new version on a slow machine.
START_SECONDS = 300.0
#: Longest version, in letters.
_LONGEST = 50
_POLL_SECONDS = 0.2


def update_to(
    stack: str, *, allowed: bool, stopped: Callable[[], bool], show: Callable[[str], None]
) -> None:
    """Install a stack's version, unless ``stopped()`` becomes True.

    ``allowed``: the machine's owner wants it. Raises :class:`VersionDiffers` with the reason and
    the command for people if it isn't installed, and :class:`VcasgdError` if pip fails.
    """
    version = _parsed(stack)
    command = [sys.executable, "-m", "pip", "install", f"vcasgd=={version}"]
    differs = f"the stack has vcasgd {version}, and this machine {vcasgd.__version__}"
    if not allowed:
        remedy = f"{shlex.join(command)}, or join with --update, which does this"
        raise VersionDiffers(differs, remedy=remedy, version=str(version), status=409)
    if (reason := _reason_not_to(version)) is not None:
        raise VersionDiffers(
            f"{differs}; --update doesn't change this, because {reason}",
            remedy=f"if you trust the stack, install vcasgd=={version} in the way in which you "
            f"installed {vcasgd.__version__}",
            version=str(version),
            status=409,
        )
    show(f"{differs}; updates: {shlex.join(command)}")
    options = ["--disable-pip-version-check", "--no-input", "--only-binary", "vcasgd"]
    with _only_one(stopped):
        if _starting() != str(version):
            _run([*command, *options], stopped)
        if not stopped() and (found := _starting()) != str(version):
            raise VcasgdError(
                f"pip installed vcasgd {version}, but this command now starts {found}",
                remedy=f"look at the installation, or return to vcasgd=={vcasgd.__version__}",
            )


def restart(more: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run this command again in its present version, with ``more`` options."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [*_program(), *sys.argv[1:], *more], env)


def _parsed(stack: str) -> Version:
    try:
        if len(stack) <= _LONGEST:
            return Version(stack)
    except InvalidVersion:
        pass
    raise ApiError("the version of the stack is none of vcasgd", remedy="check the address")


def _reason_not_to(version: Version) -> str | None:
    """Return why this installation can't or should not get a version; None if it can."""
    packages = Path(sysconfig.get_path("purelib"))
    reasons = {
        "this Python is not in a virtual environment, so others manage its packages": (
            sys.prefix == sys.base_prefix
        ),
        f"it runs from {Path(vcasgd.__file__).parent}, outside of this environment": (
            not Path(vcasgd.__file__).resolve().is_relative_to(packages.resolve())
        ),
        f"you may not write to {packages}": not os.access(packages, os.W_OK),
        "this environment has no pip": find_spec("pip") is None,
        f"{version} is no final release": version.is_prerelease or version.local is not None,
        "it installs newer versions only": version <= Version(vcasgd.__version__),
    }
    if (reason := next((each for each, holds in reasons.items() if holds), None)) is not None:
        return reason
    # An index may have another package with this name.
    if distribution("vcasgd").read_text("direct_url.json") is not None:
        return "it was installed from a file or a repository, and not from a package index"
    return None


@contextmanager
def _only_one(stopped: Callable[[], bool]) -> Iterator[None]:
    """Wait until no other agent changes this environment, which several machines may share."""

    def waiting() -> None:
        if stopped():
            raise VcasgdError("interrupted while another agent updates this environment")

    try:
        with hold_lock(Path(sys.prefix) / ".vcasgd-update.lock", PIP_SECONDS, waiting):
            yield
    except TimeoutError as error:
        raise VcasgdError(str(error), remedy="try again") from error


def _run(command: Sequence[str], stopped: Callable[[], bool]) -> None:
    """Run pip until it ends or is stopped. Raises :class:`VcasgdError` with what it said."""
    # The token of the stack is none of its business.
    env = {name: value for name, value in os.environ.items() if not name.startswith("VCASGD_")}
    deadline = time.monotonic() + PIP_SECONDS
    with tempfile.TemporaryDirectory(prefix="vcasgd-update-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            # Ctrl-C is for this process.
            pip = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        try:
            while pip.poll() is None and not stopped() and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        finally:
            ended = pip.poll() is not None
            _stop(pip)
        if pip.returncode and not stopped():
            said = [line for line in last_lines(log, 20) if line.startswith("ERROR:")]
            why = said[-1] if said else f"status {pip.returncode}"
            raise VcasgdError(
                f"pip could not install the version of the stack: {why}"
                if ended
                else f"pip was not ready after {PIP_SECONDS:g} s",
                remedy=f"run it yourself to see more: {shlex.join(command)}",
            )


def _stop(pip: subprocess.Popen[bytes]) -> None:
    """End pip if it runs. It undoes its changes after SIGINT."""
    if pip.poll() is None:
        pip.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            pip.wait(UNDO_SECONDS)
        kill(pip)


def _program() -> list[str]:
    """Return the beginning of this process's command, up to its arguments."""
    own = len(sys.orig_argv) - len(sys.argv[1:])
    return [sys.executable, *sys.orig_argv[1:own]]


def _starting() -> str:
    """Return the version that this command starts in now, or why it doesn't start."""
    try:
        done = subprocess.run(
            [*_program(), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {START_SECONDS:g} s"
    if done.returncode:
        return "with an error: " + (done.stderr.strip().splitlines() or ["no output"])[-1]
    return done.stdout.strip().removeprefix("vcasgd ")
