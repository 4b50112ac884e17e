"""Unit of systemd for this installation, and its update to the version of a stack.

The stack only names a version. The code comes from the package index that the owner of the machine
configured for pip, and only a newer final release is installed. So a hostile stack can't choose the
code, and can't bring back a version with known errors.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import NoReturn

from packaging.version import InvalidVersion, Version

import vcasgd
from vcasgd.agent.sandbox import PROCESSES, Sandbox
from vcasgd.errors import ApiError, VcasgdError, VersionDiffers
from vcasgd.local_files import write_private

NAME = "vcasgd-join.service"
#: Seconds for workers to push what they have; see the agent's own limit.
_STOP_SECONDS = 60
#: Memory of the agent itself, and of a process that measures the machine with torch.
_AGENT_BYTES = 1_000_000_000
_UNIT = """\
# Written by vcasgd join --service.
[Unit]
Description=Train for {url}
Wants=network-online.target
After=network-online.target

[Service]
EnvironmentFile={secret}
ExecStart={command}
TimeoutStopSec={stop}
# Limits of the kernel's own, above those of the sandbox. A worker is killed first.
MemoryMax={memory}
MemorySwapMax=0
TasksMax={tasks}
CPUQuota={quota}%
OOMPolicy=continue
Restart=on-failure
RestartSec=60
Nice=10

[Install]
WantedBy=default.target
"""
#: Longest version, in letters.
_MAX_VERSION = 50
#: Variable with the version that this command was started again for.
_UPDATED = "VCASGD_UPDATED_TO"


def install(
    url: str, token: str, options: Sequence[str], sandbox: Sandbox
) -> tuple[Path, str | None]:
    """Write the unit, which runs ``vcasgd join`` with these options.

    Return its file, and the URL in the one that it replaces, or None if there was none.
    ``sandbox``: limits of workers, which the unit has too. The token is in a file
    that only the user can read. Raises :class:`~vcasgd.errors.VcasgdError` if a file can't be
    written.
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    unit, secret = home / "systemd" / "user" / NAME, home / "vcasgd" / "join.env"
    command = [sys.executable, "-m", "vcasgd.cli", "join", url, *options]
    text = _UNIT.format(
        url=url.replace("%", "%%"),
        secret=str(secret).replace("%", "%%"),
        command=" ".join(map(_quoted, command)),
        stop=_STOP_SECONDS,
        memory=sandbox.memory + 2 * sandbox.files + _AGENT_BYTES,
        tasks=PROCESSES,
        quota=100 * len(sandbox.processors),
    )
    try:
        before = unit.read_text(errors="replace") if unit.exists() else None
        for path in (unit, secret):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_private(secret, f"VCASGD_TOKEN={token}\n")
        unit.write_text(text)
    except OSError as error:
        raise VcasgdError(f"can't write {error.filename}: {error.strerror}") from error
    return unit, before and before.partition("Train for ")[2].partition("\n")[0].replace("%%", "%")


def _quoted(argument: str) -> str:
    """Quote an argument of ExecStart; see systemd.service(5)."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped.replace("%", "%%").replace("$", "$$")}"'


def update_to(stack: str, *, allowed: bool, show: Callable[[str], None]) -> None:
    """Install a stack's version.

    ``allowed``: the machine's owner wants it. Raises :class:`VersionDiffers` with the reason and
    the command for people if it isn't installed, and :class:`VcasgdError` if pip fails.
    """
    version = _parsed(stack)
    command = [sys.executable, "-m", "pip", "install", f"vcasgd[worker]=={version}"]
    differs = f"the stack has vcasgd {version}, and this machine {vcasgd.__version__}"
    if not allowed:
        remedy = f"{shlex.join(command)}, or join with --update, which does this"
        raise VersionDiffers(differs, remedy=remedy, version=str(version))
    if (reason := _reason_not_to(version)) is not None:
        raise VersionDiffers(
            f"{differs}; --update doesn't change this, because {reason}",
            remedy=f"if you trust the stack, install vcasgd=={version} in the way in which you "
            f"installed {vcasgd.__version__}",
            version=str(version),
        )
    show(f"{differs}; updates: {shlex.join(command)}")
    # The token of the stack is none of pip's business. Ctrl-C reaches pip, too, which undoes its
    # changes; the service manager ends both.
    env = {name: value for name, value in os.environ.items() if not name.startswith("VCASGD_")}
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--only-binary", "vcasgd"]
    if subprocess.run(
        [*command, *options], stdin=subprocess.DEVNULL, env=env, check=False
    ).returncode:
        raise VcasgdError(
            f"pip could not install vcasgd {version}; its message is above",
            remedy=f"run it yourself to see more: {shlex.join(command)}",
        )


def restart(more: Sequence[str], env: dict[str, str], version: str) -> NoReturn:
    """Run this command again in its present version, with ``more`` options."""
    sys.stdout.flush()
    sys.stderr.flush()
    own = len(sys.orig_argv) - len(sys.argv[1:])
    argv = [sys.executable, *sys.orig_argv[1:own], *sys.argv[1:], *more]
    os.execve(sys.executable, argv, {**env, _UPDATED: version})


def _parsed(stack: str) -> Version:
    try:
        if len(stack) <= _MAX_VERSION:
            return Version(stack)
    except InvalidVersion:
        pass
    raise ApiError("the version of the stack is none of vcasgd", remedy="check the address")


def _reason_not_to(version: Version) -> str | None:
    """Return why this installation can't or should not get a version; None if it can."""
    if sys.prefix == sys.base_prefix:
        return "this Python is not in a virtual environment, so others manage its packages"
    if version.is_prerelease or version.local is not None:
        return f"{version} is a pre-release"
    if version <= Version(vcasgd.__version__):
        return "it installs newer versions only"
    # An index may have another package with this name.
    if distribution("vcasgd").read_text("direct_url.json") is not None:
        return "it was installed from a file or a repository, and not from a package index"
    if os.environ.get(_UPDATED) == str(version):
        return f"pip has installed it, and this command still starts {vcasgd.__version__}"
    return None
