"""Boot command of a new machine: a Ray node, or an agent that joins through the gateway.

It contains no credentials for servers; each worker receives its own when it is started.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from vcasgd.cluster import WORKER_MODULES, node_command
from vcasgd.fleet.providers.base import MACHINE_ID, PYTHON, Boot
from vcasgd.settings import Settings


def node_boot(
    settings: Settings,
    *,
    local: bool,
    pool: str,
    labels: Collection[str] = (),
    cpus: float = 1.0,
    gpus: int = 0,
) -> Boot:
    """Return the boot command.

    ``local``: the machine is this computer, whose folders and Python interpreter it shares.

    Raises :class:`~vcasgd.errors.SpecError` if a setting is missing.
    """
    shared = settings.ray_dir if local else None
    command = node_command(
        address=settings.required("ray_address"),
        machine_id=MACHINE_ID,
        cpus=cpus,
        gpus=gpus,
        temp_dir=shared / MACHINE_ID if shared else None,
        heartbeat=settings.heartbeat,
        token=settings.ray_token.get_secret_value() if settings.ray_token else None,
        tls=settings.ray_tls,
    )
    env = {
        "VCASGD_STORAGE_URL": settings.required("storage_url"),
        "VCASGD_HEARTBEAT": str(settings.heartbeat),
        "VCASGD_LOG_FORMAT": settings.log_format,
    }
    if not local:
        # Nothing else would end the machine if the controller never came back.
        env["VCASGD_ORPHAN_SECONDS"] = f"{settings.orphan_seconds:g}"
        return Boot((PYTHON, *command.argv[1:]), {**command.env, **env})
    env["VCASGD_CACHE_DIR"] = str(settings.home_path / "cache" / cache_name(pool, labels))
    return Boot(command.argv, {**command.env, **env}, imports=WORKER_MODULES)


def agent_boot(settings: Settings) -> Boot:
    """Return the command of a machine that joins through the gateway.

    The machine ends if the stack is gone for long. Raises :class:`~vcasgd.errors.SpecError` if
    there is no gateway.
    """
    argv = ["vcasgd", "join", settings.required("join_url"), "--machine", MACHINE_ID]
    return Boot((*argv, "--give-up", f"{settings.orphan_seconds:g}s"))


def cache_name(pool: str, labels: Collection[str]) -> str:
    """Return the folder name of a pool's cache.

    Data cached in one pool must not be visible to another, nor to the same pool under other
    labels.
    """
    if not labels:
        return pool
    return f"{pool}.{hashlib.sha256(' '.join(sorted(labels)).encode()).hexdigest()[:16]}"
