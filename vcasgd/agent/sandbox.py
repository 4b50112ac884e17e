"""Sandbox for workers, which run code of others: bubblewrap, with limits.

A worker sees the system and Python read-only, its job's code, and a temporary folder in memory.
See docs/adr/0021-owners-of-joined-machines-stay-in-control.md.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError

import vcasgd
from vcasgd.container_limits import memory_bytes
from vcasgd.errors import SpecError, StackError

#: Writable folder of a worker; and its home folder there.
TEMPORARY = Path("/tmp")
HOME = TEMPORARY / "home"
#: Folder of the packages with jobs' code.
CODE = TEMPORARY / "code"
#: Folders with the agent's notice, and with the sockets that lead to servers.
CONTROL, SERVERS = Path("/run/vcasgd/control"), Path("/run/vcasgd/servers")

#: Parts of the machine's memory that a worker may use, by default; and its files in each of two
#: folders, which are in memory too.
MEMORY_SHARE, FILES_SHARE = 0.7, 0.1
#: Most processes and threads of a worker. As many as 64 threads for each of 64 loaders.
PROCESSES = 4096
#: Priority of workers (nice): everything else on this machine goes first.
NICENESS = 10
#: The kernel kills processes with this score first when memory runs out.
OOM_SCORE = 1000
#: Seconds for the first import of torch in the sandbox.
TRIAL_SECONDS = 120.0
_TRIAL = "import torch, vcasgd.worker.main; print(torch.cuda.device_count())"

#: Programs that are needed: bubblewrap, coreutils, and util-linux.
_PROGRAMS = ("bwrap", "nice", "taskset", "choom", "prlimit")
_SYSTEM = ("/usr", "/nix/store", "/gnu/store")
_LINKED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
#: No private keys, and no configuration of services.
_CONFIGURATION = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "passwd", "group",
    "nsswitch.conf", "localtime", "os-release", "ssl/certs", "pki/tls/certs",
    "pki/ca-trust/extracted",
)  # fmt: skip
_NETWORK_CONFIGURATION = ("hosts", "resolv.conf")
#: Files of /proc that change the whole machine.
_KERNEL_FILES = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr", "pressure")
_GPU_DEVICES = ("nvidia*", "kfd", "dri/renderD*")


class SandboxMode(StrEnum):
    """Use of the sandbox."""

    REQUIRE = "require"
    OFF = "off"


@dataclass(frozen=True)
class Sandbox:
    """Limits of workers. Sizes are in bytes. ``shared``: folders of the owner that they may read.

    ``network``: they reach all that this machine reaches, not only the stack.
    """

    processors: tuple[int, ...]
    memory: int
    files: int
    network: bool = False
    shared: tuple[Path, ...] = ()

    def __str__(self) -> str:
        reach = "reach the network" if self.network else "reach only the stack"
        shared = "".join(f" but {each}" for each in self.shared)
        return (
            f"jobs see none of your files{shared} and processes, {reach}, and have at most "
            f"{self.memory / 1e9:.1f} GB of memory and twice {self.files / 1e9:.1f} GB of files"
        )

    def why_not(self, gpus: int) -> str | None:
        """Try the sandbox out: return why it doesn't work on this machine with ``gpus`` GPUs."""
        if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
            return f"there is no {', '.join(missing)}"
        try:
            done = subprocess.run(
                self.command([sys.executable, "-c", _TRIAL]),
                capture_output=True,
                stdin=subprocess.DEVNULL,
                text=True,
                timeout=TRIAL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"a start takes more than {TRIAL_SECONDS:g} s"
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["it ended at once"])[-1]
        seen = int(done.stdout.split()[-1])
        return f"{seen} of {gpus} GPUs can be used in it" if seen < gpus else None

    def command(self, argv: Sequence[str], inside: Mapping[Path, Path] | None = None) -> list[str]:
        """Return the command that runs another one in the sandbox.

        ``inside``: by its place there, each file of this machine that it can read besides.
        """
        processors = ",".join(map(str, self.processors))
        read_only = _outermost([*_python_folders(), *self.shared])
        return [
            *("nice", "-n", str(NICENESS), "taskset", "-c", processors),
            *("choom", "-n", str(OOM_SCORE), "--"),
            # The limit of a file is for the worker's log.
            *("prlimit", f"--fsize={self.files}", "--core=0", "bwrap"),
            *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
            *("--unshare-cgroup-try", "--disable-userns"),
            *(() if self.network else ("--unshare-net",)),
            *("--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *self._system(),
            *self._devices(),
            *("--size", str(self.files), "--tmpfs", str(TEMPORARY), "--dir", str(HOME)),
            *_bound("--ro-bind", {each: each for each in read_only}),
            *_bound("--ro-bind", inside or {}),
            *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(TEMPORARY), "--"),
            # Counted in the sandbox only, where no process of the owner counts.
            *("prlimit", f"--nproc={PROCESSES}"),
            *argv,
        ]

    def _system(self) -> Iterator[str]:
        for folder in map(Path, _LINKED):
            if folder.is_symlink():
                yield from ("--symlink", str(folder.readlink()), str(folder))
            else:
                yield from ("--ro-bind-try", str(folder), str(folder))
        names = _CONFIGURATION + (_NETWORK_CONFIGURATION if self.network else ())
        for path in (*_SYSTEM, *(f"/etc/{name}" for name in names)):
            yield from ("--ro-bind-try", path, path)
        yield from ("--proc", "/proc")
        # Root could write there even without any capability.
        for name in _KERNEL_FILES:
            yield from ("--ro-bind-try", f"/proc/{name}", f"/proc/{name}")

    def _devices(self) -> Iterator[str]:
        gpus = [each for name in _GPU_DEVICES for each in Path("/dev").glob(name)]
        yield from ("--dev", "/dev")
        yield from ("--size", str(self.files), "--tmpfs", "/dev/shm")
        yield from _bound("--dev-bind-try", {each: each for each in gpus})
        # Drivers of GPUs look for devices there.
        system = "/sys" if gpus else "/sys/devices/system"
        yield from ("--ro-bind-try", system, system)


def make_sandbox(
    processors: Sequence[int],
    memory: str | None,
    files: str | None,
    shared: Iterable[Path] = (),
    *,
    network: bool = False,
) -> Sandbox:
    """Make a sandbox of an owner's limits, such as ``8GB``. Raises :class:`SpecError`."""
    total = memory_bytes()
    return Sandbox(
        tuple(processors),
        _size(memory, "max-memory") or int(total * MEMORY_SHARE),
        _size(files, "max-disk") or int(total * FILES_SHARE),
        network,
        tuple(map(_checked, shared)),
    )


def choose(mode: SandboxMode, sandbox: Sandbox, gpus: int) -> tuple[Sandbox | None, str]:
    """Return the sandbox, or None without one, and a line about it for the machine's owner.

    Raises :class:`StackError` if it doesn't work, unless the owner wants none.
    """
    if mode is SandboxMode.OFF:
        return None, "no sandbox: jobs can do all that you can do on this machine"
    why_not = sandbox.why_not(gpus)
    if why_not is None:
        root = "; run it as an ordinary user, because root has no limit of processes"
        return sandbox, f"sandbox: {sandbox}{'' if os.geteuid() else root}"
    raise StackError(
        f"no sandbox: {why_not}",
        remedy="install bubblewrap 0.8 or newer, or see docs/how-to/volunteers.md; to let jobs do "
        "all that you can do on this machine, use --sandbox off",
    )


def _size(text: str | None, field: str) -> int | None:
    """Parse a size. Raises :class:`SpecError`."""
    if text is None:
        return None
    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = ByteSize(0)
    if size <= 0:
        raise SpecError(f"{text} is not a size", remedy="for example 8GB", field=field)
    return int(size)


def _checked(folder: Path) -> Path:
    """Return a folder to share with its full path. Raises :class:`SpecError`."""
    full = folder.expanduser().resolve()
    if not full.is_dir():
        raise SpecError(f"there is no folder {folder}", field="share")
    if _holds_home(full):
        raise SpecError(f"{folder} contains your home folder", field="share")
    return full


def _holds_home(folder: Path) -> bool:
    return Path.home().resolve().is_relative_to(folder)


def _python_folders() -> Iterator[Path]:
    """Return the folders of Python and its libraries, and the files that they link to."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    # The current folder is on the path if Python was started with -m.
    paths = [path for path in sys.path if path != str(Path.cwd())]
    paths += [sys.prefix, sys.base_prefix, str(Path(vcasgd.__file__).parents[1]), *libraries]
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    for path in map(Path, paths):
        if path.is_absolute() and path.exists():
            yield from (each for each in (path, path.resolve()) if not _holds_home(each))


def _outermost(folders: Iterable[Path]) -> list[Path]:
    """Return the folders that are in none of the others, or of the system."""
    kept: list[Path] = []
    for folder in sorted(set(folders)):
        if not any(folder.is_relative_to(each) for each in (*map(Path, _SYSTEM), *kept)):
            kept.append(folder)
    return kept


def _bound(option: str, places: Mapping[Path, Path]) -> Iterator[str]:
    for place, source in places.items():
        yield from (option, str(source), str(place))
