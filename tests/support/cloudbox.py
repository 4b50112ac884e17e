"""Cloud in a box: a real process tree on this host for each machine in an emulated cloud.

A machine boots as with cloud-init: the script in its user data runs with another root than the
system's, and its result is started like the image's unit, with its own metadata server. A Ray node
therefore starts, receives notices as in the cloud, and joins the cluster. An interruption is a real
notice, followed by SIGKILL for all processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from support.machine_scripts import script_of
from support.metadata import Metadata, MetadataServer
from support.waiting import PATIENCE
from vcasgd.fleet.providers.local.processes import MARKER, Process, kill_all, processes_of

log = logging.getLogger(__name__)

#: Seconds until a new machine starts to boot, and until a terminated one is dead.
POLL_SECONDS = 0.25
#: Timeout in seconds for the script in the user data.
SCRIPT_SECONDS = 120.0


class EmulatedCloud(Protocol):
    """Cloud-specific part of the box."""

    def alive(self) -> set[str]:
        """Return the machines that cost money."""
        ...

    def user_data(self, machine_id: str) -> str:
        """Return the machine's user data."""
        ...

    def tags(self, machine_id: str) -> Mapping[str, str]: ...

    def mark_stopping(self, machine_id: str) -> None:
        """Mark the machine as stopping, if the cloud shows that."""
        ...

    def remove(self, machine_id: str) -> None:
        """Remove the machine from the cloud."""
        ...


@dataclass
class Box:
    """A machine and its processes."""

    id: str
    pool: str
    folder: Path
    metadata: Metadata
    server: MetadataServer
    process: subprocess.Popen[bytes] | None = None
    taken: threading.Event = field(default_factory=threading.Event)

    def processes(self) -> set[Process]:
        return processes_of(self.id, None)

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""


class CloudBox:
    """Context manager that polls a cloud and runs its machines."""

    def __init__(self, cloud: EmulatedCloud, scratch: Path) -> None:
        self._cloud = cloud
        self._scratch = scratch
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cloudbox", daemon=True)
        self._lock = threading.RLock()
        self.boxes: dict[str, Box] = {}
        #: Errors of the box itself; a test requires at its end that there are none.
        self.problems: list[str] = []

    def __enter__(self) -> CloudBox:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=PATIENCE)
        for box in list(self.boxes.values()):
            self._power_off(box)

    def interrupt(self, machine_ids: set[str], notice_seconds: float) -> None:
        """Give real notices to all, then SIGKILL at their end. Fails if a machine is dead."""
        gone_at = time.time() + notice_seconds
        with self._lock:
            victims = [self.boxes[one] for one in sorted(machine_ids)]
        for box in victims:
            assert box.processes(), f"the fault did not fire: {box.id} was dead already"
            box.metadata.notify(gone_at)
            self._cloud.mark_stopping(box.id)
        for box in victims:
            threading.Thread(target=self._reclaim, args=(box, gone_at), daemon=True).start()

    def _reclaim(self, box: Box, gone_at: float) -> None:
        time.sleep(max(0.0, gone_at - time.time()))
        self._power_off(box)
        self._cloud.remove(box.id)

    # -- a machine's life ------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self._reconcile(self._cloud.alive())
            except Exception as error:
                log.exception("cloud in a box")
                self.problems.append(repr(error))

    def _reconcile(self, alive: set[str]) -> None:
        for id_ in sorted(alive - self.boxes.keys()):
            self._boot(id_)
        for id_ in [one for one in self.boxes if one not in alive]:
            self._power_off(self.boxes[id_])
        for id_ in alive & self.boxes.keys():
            box = self.boxes[id_]
            if box.process and box.process.poll() is not None and not box.taken.is_set():
                # The unit has Restart=always.
                self._start(box)

    def _boot(self, id_: str) -> None:
        server = MetadataServer(Metadata(id_))
        server.start()
        folder = Path(tempfile.mkdtemp(prefix="b", dir=self._scratch))
        box = Box(id_, self._cloud.tags(id_)["pool"], folder, server.metadata, server)
        with self._lock:
            self.boxes[id_] = box
        self._run_user_data(box)
        self._start(box)

    def _start(self, box: Box) -> None:
        with (box.folder / "log").open("ab") as output:
            box.process = subprocess.Popen(
                ["sh", "-c", self._unit(box)],
                env=self._environment(box),
                cwd=box.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _run_user_data(self, box: Box) -> None:
        env = {"PATH": os.environ["PATH"], "VCASGD_ROOT": str(box.folder)}
        script = script_of(self._cloud.user_data(box.id))
        subprocess.run(["sh", "-c", script], env=env, check=True, timeout=SCRIPT_SECONDS)

    def _unit(self, box: Box) -> str:
        """Do what the image's unit does: read the file, and run the arguments."""
        etc = box.folder / "etc" / "vcasgd"
        argv = (etc / "worker.argv").read_text().splitlines()
        # An image has its own Python and temporary folder; here they are this host's.
        argv[0] = sys.executable
        adjust = (
            "import json, os; argv = json.loads(os.environ['VCASGD_BOOT_ARGV']); "
            f"print(json.dumps([*argv, '--temp-dir', {str(box.folder)!r}]))"
        )
        return (
            f"set -a; . {shlex.quote(str(etc / 'worker.env'))}; "
            f"VCASGD_BOOT_ARGV=$({shlex.quote(sys.executable)} -S -c {shlex.quote(adjust)}); "
            f"exec {shlex.join(argv)}"
        )

    def _environment(self, box: Box) -> dict[str, str]:
        """Return the environment of a fresh machine, without variables of the controller."""
        fresh = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("VCASGD_", "AWS_", "GOOGLE_"))
        }
        own = {MARKER: box.id, "VCASGD_METADATA_URL": box.server.url}
        cache = {"VCASGD_CACHE_DIR": str(box.folder / "cache")}
        return {**fresh, **own, **cache}

    def _power_off(self, box: Box) -> None:
        if box.taken.is_set():
            return
        box.taken.set()
        root = None
        if box.process is not None:
            with contextlib.suppress(ProcessLookupError):
                root = Process.of(box.process.pid)
        if not kill_all(box.id, root):
            self.problems.append(f"{box.id} can't be killed")
        if box.process is not None:
            box.process.wait(timeout=PATIENCE)
        box.server.stop()
        shutil.rmtree(box.folder / "cache", ignore_errors=True)

    def logs(self) -> str:
        return "\n".join(f"=== {box.id}\n{box.log()[-2000:]}" for box in self.boxes.values())


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Create a folder with a short path, as Ray's sockets need it."""
    path = Path(tempfile.mkdtemp(prefix="vbox-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
