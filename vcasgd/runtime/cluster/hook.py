"""What runs inside ``ray start`` of a head, for lack of an option."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vcasgd.runtime.cluster.commands import PASSWORD_VARIABLE


def start_hook(parameters: Any, _head: bool) -> None:
    """Called by Ray with its parameters before anything is started."""
    parameters.ray_client_server_port = None
    _forget_last_life(Path(parameters.temp_dir))
    password = os.environ.pop(PASSWORD_VARIABLE, None)
    if password is not None:
        parameters.redis_password = password
        _hide_password()


def _forget_last_life(temp_dir: Path) -> None:
    """Lets a head start again although nodes of this host still name its address.

    Ray takes them for the head itself if this file says that there was one.
    """
    (temp_dir / "ray_current_cluster").unlink(missing_ok=True)


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
