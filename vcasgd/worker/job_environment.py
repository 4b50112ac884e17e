"""Needs of a job besides its code: its variables, its packages, and its setup commands.

The packages are in an environment of their own, on top of the one that the platform runs in. A
worker is a fork of a process that has imported torch already, so the environment is added to
``sys.path``. See docs/adr/0019-workers-are-forks.md.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vcasgd.errors import SetupFailed
from vcasgd.local_files import default_cache_folder, hold_lock
from vcasgd.logging import last_lines
from vcasgd.printable import hide
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.store.acl import lease_pass
from vcasgd.store.ledger.job_secrets import receive_secrets
from vcasgd.worker import WorkerContext

#: Most seconds that the packages take, and the setup commands together.
INSTALL_SECONDS = SETUP_SECONDS = 1800.0
#: Most seconds to wait for another worker of this machine that prepares the same environment.
LOCK_SECONDS = INSTALL_SECONDS + SETUP_SECONDS + 60
#: File in an environment that is complete.
COMPLETE = "vcasgd-complete"
#: The distribution of this package.
PLATFORM = "vcasgd"
#: Its extra with what trains.
WORKER_EXTRA = "worker"
#: Lines of the output that an error shows.
SHOWN_LINES = 40
POLL_SECONDS = 0.1
#: In a sandbox (:mod:`vcasgd.agent.sandbox`), only the stack is reached.
NETWORK_REMEDY = (
    "this machine lets jobs reach only the stack; if the command needs more, use another pool, or "
    "have the owner start the machine with vcasgd join --allow-network"
)


def set_variables(context: WorkerContext, spec: JobSpec, on_progress: Callable[[], None]) -> None:
    """Set the job's variables and secrets in this process; its output shows no secret any more.

    Raises :class:`~vcasgd.errors.StoreUnavailable` if no controller delivers the secrets.
    """
    os.environ.update(spec.env)
    if spec.secrets:
        seconds = context.settings.patience_seconds
        own_pass = lease_pass(context.key) if context.key else ""
        values = receive_secrets(
            context.ledger, context.job, context.name, own_pass, seconds, on_progress
        )
        hide(values.values())
        os.environ.update(values)


def use_packages(
    spec: JobSpec, package: str, code: Path, settings: Settings, on_progress: Callable[[], None]
) -> None:
    """Make the job's packages importable; first install them and run its setup commands.

    That is done once on each machine and for each content of these files. Raises
    :class:`SetupFailed`.
    """
    if spec.requirements is None and not spec.setup:
        return
    cache = settings.cache_dir
    folder = cache / "environments" if cache else default_cache_folder("environments")
    environment = JobEnvironment(spec, package, code, folder)
    environment.prepare(on_progress)
    environment.activate()


class JobEnvironment:
    """Virtual environment of one job's packages, on top of the platform's packages."""

    def __init__(self, spec: JobSpec, package: str, code: Path, cache: Path) -> None:
        self._setup = spec.setup
        self._code = code
        self._requirements = code / spec.requirements if spec.requirements else None
        self._versions = platform_versions()
        self.folder = cache / self._digest(package)
        paths = sysconfig.get_paths("venv", vars={"base": str(self.folder)})
        self._site, self._bin = Path(paths["purelib"]), Path(paths["scripts"])

    def prepare(self, on_progress: Callable[[], None]) -> None:
        """Build the environment, unless this machine has it. Raises :class:`SetupFailed`."""
        lock = self.folder.with_suffix(".lock")
        try:
            with hold_lock(lock, LOCK_SECONDS, on_progress) as held:
                if not (self.folder / COMPLETE).exists():
                    shutil.rmtree(self.folder, ignore_errors=True)
                    self._build(on_progress, held.fileno())
                    (self.folder / COMPLETE).touch()
        except TimeoutError as error:
            raise SetupFailed(f"setup: {error}") from None

    def activate(self) -> None:
        """Put the packages first on the path of this process, and of the ones that it starts.

        Raises :class:`SetupFailed` if this process has imported another version of one already.
        """
        self._check_imported()
        before = list(sys.path)
        site.addsitedir(str(self._site))
        added = [path for path in sys.path if path not in before]
        sys.path[:] = [*added, *before]
        importlib.invalidate_caches()
        os.environ.update(self.variables(os.environ.get("PATH", os.defpath)))

    def variables(self, path: str) -> dict[str, str]:
        """Return the variables of processes that find the packages' programs first, and then those
        of ``path``."""
        return {"PATH": f"{self._bin}{os.pathsep}{path}", "VIRTUAL_ENV": str(self.folder)}

    def python_path(self) -> str:
        """Return the folder of the packages."""
        return str(self._site)

    def _digest(self, package: str) -> str:
        """Return a name that changes with everything that the environment depends on."""
        text = self._read_requirements() if self._requirements else ""
        # Commands, and references in requirements, can depend on all files of the package.
        depends = bool(self._setup) or any(map(_refers_to_files, text.splitlines()))
        parts = [sys.version, sys.prefix, self._versions, text, self._setup, depends and package]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _read_requirements(self) -> str:
        assert self._requirements is not None
        try:
            return self._requirements.read_text()
        except (OSError, ValueError):
            name = self._requirements.relative_to(self._code)
            raise SetupFailed(
                f"requirements: the job's package has no text file {name}",
                remedy="the path is relative to working_dir",
            ) from None

    def _build(self, on_progress: Callable[[], None], lock: int) -> None:
        venv.create(self.folder, symlinks=True)
        # pip counts packages on the path as installed, and changes none outside the environment.
        platform = "\n".join(path for path in sys.path if Path(path).is_absolute())
        (self._site / "vcasgd-platform.pth").write_text(platform)
        constraints = self.folder / "constraints.txt"
        constraints.write_text(
            "".join(f"{name}=={version}\n" for name, version in self._versions.items())
        )
        env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **self.variables(os.environ.get("PATH", os.defpath)),
            "PIP_CONSTRAINT": str(constraints),
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        if self._requirements is not None:
            python, name = str(self._bin / "python"), self._requirements.name
            argv = [python, "-m", "pip", "install", "--requirement", name]
            folder = self._requirements.parent
            run_command(argv, "requirements", folder, env, INSTALL_SECONDS, on_progress, lock)
        if self._setup:
            script = "\n".join(["set -e", *self._setup])
            argv = ["sh", "-c", script]
            run_command(argv, "setup", self._code, env, SETUP_SECONDS, on_progress, lock)

    def _check_imported(self) -> None:
        for entry in sorted(self._site.iterdir()):
            name = entry.name.partition(".")[0]
            module = sys.modules.get(name) if entry.suffix != ".dist-info" else None
            file = getattr(module, "__file__", None)
            if file and not Path(file).is_relative_to(self._site):
                raise SetupFailed(
                    f"requirements: {name} can't be installed for a job, because workers have "
                    "imported the platform's version of it already",
                    remedy="use that version, or install another one on all machines",
                )


def _refers_to_files(line: str) -> bool:
    """Return True if a line of a requirements file can refer to other files."""
    return line.lstrip().startswith(("-", ".", "/")) or "@" in line or "://" in line


def platform_versions() -> dict[str, str]:
    """Return the versions of what a worker depends on, and of what that does, by sorted names.

    A job can't replace them. All installed packages count if this package is not installed itself.
    """
    try:
        found = _needed_by(distribution(PLATFORM))
    except PackageNotFoundError:
        found = {canonicalize_name(each.name): each.version for each in distributions()}
    return dict(sorted(found.items()))


def _needed_by(root: Distribution) -> dict[str, str]:
    found: dict[str, str] = {}
    left = [root]
    extras: tuple[str, ...] = ("", WORKER_EXTRA)
    while left:
        for line in left.pop().requires or ():
            requirement = Requirement(line)
            name, marker = canonicalize_name(requirement.name), requirement.marker
            if name in found or not (
                marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
            ):
                continue
            try:
                needed = distribution(name)
            except PackageNotFoundError:
                continue
            found[name] = needed.version
            left.append(needed)
        extras = ("",)
    return found


# -- commands that run in bounded time -------------------------------------------------------------


def run_command(
    argv: Sequence[str],
    what: str,
    cwd: Path,
    env: Mapping[str, str],
    seconds: float,
    on_progress: Callable[[], None],
    inherited: int,
) -> None:
    """Run a command, and kill its process group after ``seconds``.

    ``what`` is the field of the job file that asks for it. ``on_progress`` is called all the time;
    if it raises, the command is killed. The command inherits the file descriptor ``inherited``.
    Raises :class:`SetupFailed` with the last lines of the output.
    """
    with tempfile.NamedTemporaryFile() as output:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            pass_fds=(inherited,),
        )
        deadline, ended = time.monotonic() + seconds, False
        try:
            while not (ended := _has_ended(process.pid)) and time.monotonic() < deadline:
                on_progress()
                time.sleep(POLL_SECONDS)
        finally:
            # Also what the command has left running.
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        if not ended or status:
            has_network = any(name != "lo" for _, name in socket.if_nameindex())
            how = f"ended with status {status}" if ended else f"took more than {seconds:.0f} s"
            raise SetupFailed(
                f"{what}: the command {how}",
                remedy=None if has_network else NETWORK_REMEDY,
                traceback="\n".join(last_lines(Path(output.name), SHOWN_LINES)),
            )


def _has_ended(pid: int) -> bool:
    """Return True if a child has ended. It stays a zombie, so its group keeps its number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
