"""What runs inside ``ray start`` of a head, for lack of an option."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vcasgd.cluster.commands import PASSWORD_VARIABLE

#: what Ray has to clear up by itself, and to say what died
FAREWELL_SECONDS = 3.0
#: the last words of a head
CONTROL_SERVICE_DIED = "Ray's control service died, and the head ends with it"


def start_hook(parameters: Any, _head: bool) -> None:
    """Called by Ray with its parameters before anything is started."""
    parameters.ray_client_server_port = None
    _forget_last_life(Path(parameters.temp_dir))
    _end_with_the_control_service()
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    if password is not None:
        parameters.redis_password = password
        _hide_password()


def _forget_last_life(temp_dir: Path) -> None:
    """Lets a head start again although nodes of this host still name its address.

    Ray takes them for the head itself if this file says that there was one.
    """
    (temp_dir / "ray_current_cluster").unlink(missing_ok=True)


def _end_with_the_control_service() -> None:
    """Lets a head end, and be started again, whose control service dies while it starts.

    Ray looks after its processes only once all of them are up. Until then it waits for its
    control service, dead or alive, for as long as a node may be without one.
    """
    from ray._private import ray_constants, services

    start_process = services.start_ray_process

    def watched(command: list[str], process_type: str, *arguments: Any, **options: Any) -> Any:
        started = start_process(command, process_type, *arguments, **options)
        if process_type == ray_constants.PROCESS_TYPE_GCS_SERVER:
            threading.Thread(target=_end_after, args=(started.process,), daemon=True).start()
        return started

    services.start_ray_process = watched


def _end_after(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    time.sleep(FAREWELL_SECONDS)
    sys.stderr.write(f"{CONTROL_SERVICE_DIED}\n")
    sys.stderr.flush()
    os._exit(1)


def _hide_password() -> None:
    """Ray hands the ledger's password to its children as an argument, where ``ps`` shows it.

    The raylet does without; the control service reads its flags from the environment too.
    """
    from ray._private import services

    start_raylet, start_process = services.start_raylet, services.start_ray_process

    def without_password(*arguments: Any, **options: Any) -> Any:
        return start_raylet(*arguments, **{**options, "redis_password": None})

    def by_environment(command: list[str], *arguments: Any, **options: Any) -> Any:
        marked = [part for part in command if part.startswith("--redis_password=")]
        for part in marked:
            command[command.index(part)] = "--fromenv=redis_password"
            options["env_updates"] = {"FLAGS_redis_password": part.partition("=")[2]}
        return start_process(command, *arguments, **options)

    services.start_raylet, services.start_ray_process = without_password, by_environment
