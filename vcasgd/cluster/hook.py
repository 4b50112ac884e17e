"""Changes to ``ray start`` of a head that Ray has no options for.

They replace private functions of Ray, so ``pyproject.toml`` caps its version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vcasgd.cluster.commands import PASSWORD_VARIABLE

#: Seconds that Ray has to clean up and to log what died.
CLEANUP_SECONDS = 3.0
#: Last line in the log of a head that lost its control service.
CONTROL_SERVICE_DIED = "Ray's control service died, and the head ends with it"


def start_hook(parameters: Any, _head: bool) -> None:
    """Change Ray's parameters; ``ray start`` calls this before it starts anything."""
    parameters.ray_client_server_port = None
    _remove_last_address(Path(parameters.temp_dir))
    _end_with_the_control_service()
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    if password is not None:
        parameters.redis_password = password
        _hide_password()


def _remove_last_address(temp_dir: Path) -> None:
    """Let a head restart although nodes of this host still use its address.

    With this file, Ray takes those nodes for a running head.
    """
    (temp_dir / "ray_current_cluster").unlink(missing_ok=True)


def _end_with_the_control_service() -> None:
    """Make a head exit if its control service dies while the head starts.

    Ray monitors its processes only once all of them run. Until then it waits for the control
    service, dead or alive, for as long as a node may be without one.
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
    time.sleep(CLEANUP_SECONDS)
    sys.stderr.write(f"{CONTROL_SERVICE_DIED}\n")
    sys.stderr.flush()
    os._exit(1)


def _hide_password() -> None:
    """Pass the ledger's password to Ray's children without showing it in ``ps``.

    Ray passes it as an argument. The raylet does not need it, and the control service also reads
    its flags from the environment.
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
