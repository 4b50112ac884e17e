"""Route for a shell beside a worker: whether it is allowed, and how to get there.

The API runs nothing. It answers with the machine and the command that leads there, which the
client runs with the user's own rights, and records who asked in the job's events.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter

from vcasgd.api.access import ADMIN, CallerDep, JobDep, Services, ServicesDep
from vcasgd.api.problems import documented
from vcasgd.errors import Conflict, NotFound
from vcasgd.fleet.pools import cache_name
from vcasgd.gpus import VISIBLE
from vcasgd.printable import printable
from vcasgd.schemas.fleet import ShellAccess, ShellRequest
from vcasgd.worker_names import machine_of

router = APIRouter(tags=["fleet"])

#: Why there is no shell beside workers of other pools.
_REFUSED = {
    "join": "its machine belongs to someone else, and runs jobs in a sandbox",
    "slurm": "it runs in a sandbox, as a job of your Slurm cluster",
    "kubernetes": "it runs in a sandbox, as a pod of your cluster",
}
_REMEDIES = {
    "slurm": "on a login node: srun --jobid ID --overlap --pty bash",
    "kubernetes": "with your cluster's rights: kubectl exec -it POD -- bash",
}
#: Characters of a program's name in an event.
_MAX_NAME = 60


@router.post("/jobs/{job}/exec", dependencies=ADMIN, responses=documented(409))
def request_shell(
    services: ServicesDep, caller: CallerDep, job: JobDep, body: ShellRequest
) -> ShellAccess:
    """Show how to run a command, or a shell, beside a worker; the API itself runs nothing.

    The status is 409 where the worker's pool doesn't allow it. The job's events name the caller,
    the worker, and the program, without its arguments.
    """
    beats = services.beats.of(job.id)
    gpus = {name: beat.visible_gpus for name, beat in beats.items()}
    worker, argv = _chosen(services, job.id, body, gpus)
    machine = machine_of(worker)
    pool = services.control.machines()[machine]["pool"]
    labels = services.control.pools().get(pool, {}).get("labels") or ()
    folder = services.settings.home_path / "cache" / cache_name(pool, labels)
    name = printable(PurePath(body.command[0]).name[:_MAX_NAME]) if body.command else "a shell"
    services.jobs.event(
        job.id,
        "exec",
        f"{caller.name} runs {name} beside {worker}",
        worker=worker,
        machine=machine,
        user=caller.name,
    )
    return ShellAccess(
        worker=worker,
        machine=machine,
        argv=argv,
        folder=None if argv else str(folder),
        gpus=gpus.get(worker),
    )


def _chosen(
    services: Services, job: str, body: ShellRequest, gpus: Mapping[str, str | None]
) -> tuple[str, list[str]]:
    """Return the named worker of the job, or the first that allows it, and the command.

    ``gpus``: CUDA_VISIBLE_DEVICES of each worker; a command sees the same GPUs.
    """
    names = sorted(services.jobs.workers.names(job))
    if body.worker is not None and body.worker not in names:
        raise NotFound(f"job {job} has no worker {body.worker}", remedy=f"vcasgd workers {job}")
    machines, pools = services.control.machines(), services.control.pool_specs()
    why = Conflict(f"job {job} has no worker on a machine now", remedy=f"vcasgd show {job}")
    for name in names if body.worker is None else [body.worker]:
        # What a worker says about itself doesn't count.
        row = machines.get(machine_of(name), {})
        if row.get("job") == job:
            try:
                pool = pools.get(row["pool"], {})
                visible = ["env", f"{VISIBLE}={own}"] if (own := gpus.get(name)) else []
                command = [*visible, *body.command] if body.command else []
                return name, shell_command(machine_of(name), row, pool, command)
            except Conflict as error:
                why = error
    raise why


def shell_command(
    machine: str, row: Mapping[str, Any], pool: Mapping[str, Any], command: Sequence[str]
) -> list[str]:
    """Return the command that runs another one on a machine, or opens a shell without one.

    Empty: the machine is the computer of the stack. ``row``: the machine in the ledger, and
    ``pool``: its pool's configuration. Raises :class:`Conflict` if that isn't allowed.
    """
    provider = str(pool.get("provider"))
    if provider in _REFUSED or pool.get("trust") == "volunteer":
        why = _REFUSED.get(provider, _REFUSED["join"])
        raise Conflict(
            f"there is no shell beside workers of pool {row['pool']}: {why}",
            remedy=_REMEDIES.get(provider, "log what you need: vcasgd logs shows it"),
        )
    if provider == "local":
        return []
    if provider == "aws":
        session = ["aws", "ssm", "start-session", "--target", machine]
        session += ["--region", str(pool.get("region", ""))]
        if not command:
            return session
        document = ["--document-name", "AWS-StartInteractiveCommand", "--parameters"]
        return [*session, *document, json.dumps({"command": [shlex.join(command)]})]
    if provider == "gcp":
        project = str((pool.get("template") or {}).get("project", ""))
        ssh = ["gcloud", "compute", "ssh", machine, "--tunnel-through-iap"]
        ssh += ["--project", project, "--zone", str(row.get("zone", ""))]
        return [*ssh, "--command", shlex.join(command)] if command else ssh
    raise Conflict(f"the pool of {machine} is no longer known", remedy="choose another worker")
