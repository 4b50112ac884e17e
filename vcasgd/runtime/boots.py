"""What a new machine runs: a node of the cluster, with what any worker on it has to know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vcasgd.runtime.cluster import node_command
from vcasgd.settings import Settings


def node_boot(
    settings: Settings,
    *,
    python: str,
    instance_id: str,
    cpus: float,
    gpus: int,
    local: bool,
    labels: Mapping[str, str],
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The arguments and the environment; nothing in it opens a server: that is told to each
    worker when it is started.

    ``python`` and ``instance_id`` may be placeholders. Folders of this computer are told to
    ``local`` machines only. Raises :class:`~vcasgd.errors.SpecError`.
    """
    shared = local and settings.ray_dir
    command = node_command(
        address=settings.required("ray_address"),
        instance_id=instance_id,
        cpus=cpus,
        gpus=gpus,
        temp_dir=Path(shared) / instance_id if shared else None,
        heartbeat=settings.heartbeat,
        labels=labels,
        token=settings.ray_token.get_secret_value() if settings.ray_token else None,
    )
    env = {
        "VCASGD_STORAGE_URL": settings.required("storage_url"),
        "VCASGD_HEARTBEAT": str(settings.heartbeat),
    }
    if local:
        env["VCASGD_CACHE_DIR"] = str(settings.home_path / "cache")
    return (python, *command.argv[1:]), {**command.env, **env}
