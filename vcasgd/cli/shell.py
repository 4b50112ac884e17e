"""Commands that run another command, or a shell, beside a worker."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from vcasgd.cli.output import JobName, Token, Url, err, open_client
from vcasgd.client import Job
from vcasgd.errors import FleetError, SpecError
from vcasgd.gpus import VISIBLE
from vcasgd.schemas.fleet import ShellAccess
from vcasgd.worker_names import machine_of

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[WORKER] -- COMMAND", help="Worker or its machine (default: the first)."
    ),
]


def exec_(job: JobName, words: Words = None, url: Url = None, token: Token = None) -> None:
    """Run a command beside a worker, with the code, packages, and GPUs of its job.

    On a local machine, it runs here; on a cloud's machine, over its own tool (aws, gcloud), with
    your rights. Needs scope admin, and is in the job's events. Not available
    on joined machines or in a sandbox.
    """
    with open_client(url, token) as client:
        found = client.job(job)
        worker, command = _split(found, words or [])
        if not command:
            raise SpecError("no command is given", remedy=f"vcasgd exec {job} -- nvidia-smi")
        access = found.shell(worker, command)
    _run(found, access, command)


def ssh(
    job: JobName,
    worker: Annotated[
        str | None, typer.Argument(metavar="WORKER", help="Worker or machine (default: the first).")
    ] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Open a shell beside a worker, as `vcasgd exec` runs a command."""
    with open_client(url, token) as client:
        found = client.job(job)
        # A name that no worker has is no command here.
        access = found.shell(worker and (_split(found, [worker])[0] or worker), [])
    _run(found, access, [])


def _split(job: Job, words: list[str]) -> tuple[str | None, list[str]]:
    """Return the worker, which its machine names, too, and the command."""
    first = words[0] if words else ""
    if first.startswith(f"{job.id}."):
        return first, words[1:]
    named = (row.name for row in job.workers() if first and machine_of(row.name) == first)
    worker = min(named, default=None)
    return worker, words[1:] if worker else words


def _run(job: Job, access: ShellAccess, command: list[str]) -> NoReturn:
    if access.folder is None:
        err.print(shlex.join(access.argv), style="dim")
        _replace(access.argv, dict(os.environ))
    code = Path(access.folder) / job.package
    if not code.is_dir():
        raise FleetError(
            f"{access.worker} runs on the stack's computer, and its code is not here: {code}",
            remedy="run this command there, as the user of the stack",
        )
    err.print(f"beside {access.worker}, in {code}", style="dim")
    os.chdir(code)
    variables = {**_variables(job, Path(access.folder), code), "VCASGD_WORKER": access.worker}
    if access.gpus is not None:
        variables |= {VISIBLE: access.gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    _replace(command or [os.environ.get("SHELL", "/bin/sh")], variables)


def _variables(job: Job, cache: Path, code: Path) -> dict[str, str]:
    """Return the environment of a job's process, without its secrets and those of the stack."""
    # It needs torch, which other commands do without.
    from vcasgd.worker.job_environment import COMPLETE, JobEnvironment

    own = {name: value for name, value in os.environ.items() if not name.startswith("VCASGD_")}
    paths = [str(code), own.get("PYTHONPATH")]
    # Programs of the platform's environment, such as its python, are found before others.
    programs = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', os.defpath)}"
    found = {**own, "PATH": programs, **job.spec.env, "VCASGD_JOB": job.id}
    environment = JobEnvironment(job.spec, job.package, code, cache / "environments")
    if (environment.folder / COMPLETE).exists():
        found |= environment.variables(programs)
        paths.insert(1, environment.python_path())
    return {**found, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _replace(argv: list[str], variables: dict[str, str]) -> NoReturn:
    """Run a program in place of this one."""
    sys.stdout.flush()
    try:
        os.execvpe(argv[0], argv, variables)
    except OSError as error:
        raise FleetError(
            f"can't run {argv[0]}: {error.strerror}",
            remedy="if it is meant to be a worker, vcasgd workers JOB lists their names",
        ) from error
