"""Routes that submit, show, and control jobs, and that check job files."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import yaml
from fastapi import APIRouter, Body, Header, Query, Response, status
from pydantic import ValidationError

from vcasgd.api.access import READ, SUBMIT, CallerDep, JobDep, OwnJobDep, Services, ServicesDep
from vcasgd.api.convert import job_view
from vcasgd.api.problems import documented
from vcasgd.api.routes.costs import planned_work
from vcasgd.api.routes.files import object_name, stored_checkpoints
from vcasgd.encryption import StorageCipher
from vcasgd.errors import NotFound, SpecError
from vcasgd.fleet.estimate import deadline_estimate
from vcasgd.fleet.observed import pools_in
from vcasgd.fleet.pools import pools_of_job
from vcasgd.logging import isolated
from vcasgd.schemas.history import chosen
from vcasgd.schemas.jobs import (
    ChangeRequest,
    JobText,
    JobView,
    Mistake,
    ResumeRequest,
    SubmitRequest,
    Validation,
)
from vcasgd.settings import Settings
from vcasgd.spec.hardware import check_resources
from vcasgd.spec.job import JobSpec, JobState, load_job_mapping
from vcasgd.spec.problems import spec_errors
from vcasgd.spec.update import unstable_settings
from vcasgd.storage.checkpoints import Checkpoints
from vcasgd.storage.objects import Storage
from vcasgd.store.ledger.job import JobRecord
from vcasgd.store.ledger.job_secrets import encrypt_secrets
from vcasgd.store.ledger.retention import Retention

router = APIRouter(tags=["jobs"])

YAML = "application/yaml"
#: Most mistakes in a response; nobody corrects more at a time.
MAX_MISTAKES = 50

_YAML: dict[int | str, dict[str, Any]] = {
    200: {"description": "A job file.", "content": {YAML: {"schema": {"type": "string"}}}}
}

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        pattern=r"^[\x20-\x7e]+$",
        description="A request with the same key returns the same job.",
    ),
]
ResumeBody = Annotated[ResumeRequest | None, Body()]

_EXISTING: dict[int | str, dict[str, Any]] = {
    200: {"model": JobView, "description": "An earlier request with this key created the job."}
}


@router.post(
    "/jobs",
    dependencies=SUBMIT,
    status_code=status.HTTP_201_CREATED,
    responses=_EXISTING | documented(409, 507),
)
def submit_job(
    services: ServicesDep,
    caller: CallerDep,
    response: Response,
    body: SubmitRequest,
    idempotency_key: IdempotencyKey = None,
) -> JobView:
    """Create a job. A repeated request with the same `Idempotency-Key` returns the same job."""
    _check_package(services.storage, body.package)
    _check_pools(services, body.spec)
    job, created = services.jobs.submit_once(
        _with_start(services, body.spec),
        body.package,
        idempotency_key,
        owner=caller.name,
        owner_limit=caller.max_machines,
        encrypt=_encryption(services.settings, body),
    )
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    if not created:
        response.status_code = status.HTTP_200_OK
    return _view(services, job)


def _view(services: Services, job: JobRecord) -> JobView:
    loss = services.jobs.newest_losses([job.id])[job.id]
    return job_view(job, services.beats.traffic(job.id), loss)


def _encryption(settings: Settings, body: SubmitRequest) -> Callable[[str], str] | None:
    """Return the function that encrypts the request's secrets; None if there are none."""
    names, values = body.spec.secrets.keys(), body.secrets or {}
    if missing := sorted(names - values.keys()):
        raise SpecError(
            f"secrets.{missing[0]}: the request has no value for it",
            remedy="submit the job file with vcasgd submit, which reads the values, or send them "
            "in the request's secrets",
            field=f"secrets.{missing[0]}",
        )
    if unknown := sorted(values.keys() - names):
        # Without the name, which may be a value that was confused with it.
        raise SpecError(
            f"secrets: {len(unknown)} values are for secrets that the job does not declare",
            field="secrets",
        )
    if not values:
        return None
    if settings.secrets_key is None:
        raise SpecError(
            "secrets: this cluster has no key to encrypt them",
            remedy="set VCASGD_SECRETS_KEY for the API and the controller",
            field="secrets",
        )
    cipher = StorageCipher(settings.secrets_key.get_secret_value())
    plain = {name: value.get_secret_value() for name, value in values.items()}
    return lambda job: encrypt_secrets(cipher, job, plain)


def _check_package(storage: Storage, digest: str) -> None:
    if not storage.has(object_name(digest)):
        raise SpecError(
            f"package: {digest[:12]}… is not uploaded",
            remedy=f"vcasgd submit uploads it; with REST, PUT it to /api/v1/packages/{digest}",
            field="package",
        )


def _with_start(services: Services, spec: JobSpec) -> JobSpec:
    """Return the specification with the name of the checkpoint that it starts from."""
    source = spec.start_from
    if source is None or source.job is None:
        return spec
    try:
        rows = stored_checkpoints(services, services.jobs.get(source.job))
    except NotFound as error:
        remedy = f"start_from takes the ID of a job, not its name; {error.remedy}"
        raise SpecError(
            f"start_from: {error.message}", remedy=remedy, field="start_from"
        ) from error
    found = chosen(rows, source.checkpoint)
    if found is None:
        raise SpecError(
            f"start_from: job {source.job} has no checkpoint"
            + (f" {source.checkpoint}" if source.checkpoint else " yet"),
            remedy=f"vcasgd checkpoints {source.job} lists them",
            field="start_from",
        )
    exact = source.model_copy(update={"checkpoint": found.name})
    return spec.model_copy(update={"start_from": exact})


def _check_pools(services: Services, spec: JobSpec) -> None:
    """Check the job's pools and labels, once a controller has reported its pools, and refuse a
    deadline that has passed, or that can't be kept by what is known of the job."""
    pools = pools_in(services.control.pools())
    kinds = {pool.name: pool.kinds for pool in pools}
    names = pools_of_job(spec, pools, kinds)
    unknown = [name for name in names if name not in kinds]
    if kinds and unknown:
        raise SpecError(
            f"workers.pools: there is no pool {unknown[0]!r}",
            remedy=f"choose from {', '.join(sorted(kinds))}",
            field="workers.pools",
        )
    own = [pool for pool in pools if pool.name in names]
    if own and not any(pool.labels.issuperset(spec.required_labels) for pool in own):
        raise SpecError(
            f"labels: none of the pools {', '.join(names)} may see all of "
            f"{', '.join(spec.required_labels)}",
            remedy="choose a pool with these labels; vcasgd plan shows why each one is excluded",
            field="labels",
        )
    if kinds:
        check_resources(spec.resources, names, kinds)
    vacant = [pool.with_room(vacant=True) for pool in own]
    deadline_estimate(spec, vacant, planned_work(services, spec), time.time())


@router.get("/jobs", dependencies=READ, responses=documented(404))
def list_jobs(
    services: ServicesDep,
    response: Response,
    state: Annotated[
        JobState | Literal["active", "queued"] | None,
        Query(
            description="List only jobs in this state; `active`: all that have not ended; "
            "`queued`: those that start and have no machine yet."
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[
        str | None, Query(max_length=200, description="List only jobs older than this one.")
    ] = None,
    prefix: Annotated[
        str, Query(description="List only jobs whose IDs, which start with their names, start so.")
    ] = "",
) -> list[JobView]:
    """List jobs, newest first. If there are more, the header `Link` has the address of the next
    ones, with `rel="next"`."""
    states = _states(state)
    records, views = services.jobs.all(states, limit + 1, after, prefix), []
    if len(records) > limit:
        del records[limit:]
        query = {"after": services.jobs.place(records[-1].id), "limit": limit, "prefix": prefix}
        query |= {"state": state} if state else {}
        response.headers["Link"] = f'<jobs?{urlencode(query)}>; rel="next"'
    names = [job.id for job in records]
    traffic, losses = services.beats.traffic_of(names), services.jobs.newest_losses(names)
    for job in records:
        with isolated(job.id):
            if state != "queued" or job.queued:
                views.append(job_view(job, traffic[job.id], losses[job.id]))
    return views


def _states(chosen: JobState | Literal["active", "queued"] | None) -> tuple[JobState, ...]:
    if chosen == "queued":
        return (JobState.STARTING,)
    if isinstance(chosen, JobState):
        return (chosen,)
    return tuple(state for state in JobState if chosen is None or not state.over)


@router.get("/jobs/{job}", dependencies=READ)
def get_job(services: ServicesDep, job: JobDep) -> JobView:
    """Show a job."""
    return _view(services, job)


@router.patch("/jobs/{job}", dependencies=SUBMIT, responses=documented(409))
def change_job(services: ServicesDep, job: OwnJobDep, body: ChangeRequest) -> JobView:
    """Change the priority or the weight of a job that has not ended."""
    changes = body.model_dump(exclude_none=True)
    return _view(services, services.jobs.change(job.id, changes) if changes else job)


@router.delete(
    "/jobs/{job}",
    dependencies=SUBMIT,
    status_code=status.HTTP_204_NO_CONTENT,
    responses=documented(409),
)
def delete_job(services: ServicesDep, job: OwnJobDep) -> None:
    """Delete a job that has ended, with its history, checkpoints, and model."""
    checkpoints = Checkpoints(services.storage, job.id)
    if job.state.over:
        # first, so that a repeated request finds the job if this fails
        checkpoints.delete_all()
    Retention(services.ledger).delete(job.id)
    # The controller deletes what it writes from now on, but not what it has just written.
    checkpoints.delete_all()


@router.post("/jobs/{job}/pause", dependencies=SUBMIT, responses=documented(409))
def pause_job(services: ServicesDep, job: OwnJobDep) -> JobView:
    """Pause a running job. Its workers push their work and leave."""
    return _view(services, services.jobs.pause(job.id))


@router.post("/jobs/{job}/resume", dependencies=SUBMIT, responses=documented(409))
def resume_job(services: ServicesDep, job: OwnJobDep, options: ResumeBody = None) -> JobView:
    """Resume a paused job."""
    budget = options.max_cost_usd if options else None
    return _view(services, services.jobs.resume(job.id, max_cost_usd=budget))


@router.post("/jobs/{job}/cancel", dependencies=SUBMIT, responses=documented(409))
def cancel_job(services: ServicesDep, job: OwnJobDep) -> JobView:
    """Cancel a job that has not ended."""
    return _view(services, services.jobs.cancel(job.id))


# -- job files ----------------------------------------------------------------------------------


@router.post("/jobs/validate", dependencies=READ)
def validate_job(body: JobText) -> Validation:
    """Check a job file: list its mistakes, or the settings that are known to train badly."""
    try:
        spec = JobSpec.model_validate(load_job_mapping(body.yaml))
    except SpecError as error:
        line = error.details.get("line")
        return _invalid(Mistake(path="", message=error.message, remedy=error.remedy, line=line))
    except ValidationError as error:
        return _invalid(*map(_mistake, spec_errors(error, JobSpec)[:MAX_MISTAKES]))
    warnings = [
        Mistake(path=setting.field, message=setting.message, remedy=setting.remedy)
        for setting in unstable_settings(spec)
    ]
    return Validation(valid=True, errors=[], warnings=warnings, spec=spec)


@router.get("/schema/job", dependencies=READ)
def get_job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file."""
    return JobSpec.model_json_schema()


@router.get("/jobs/{job}/spec", dependencies=READ, response_class=Response, responses=_YAML)
def get_job_spec(job: JobDep) -> Response:
    """Return the job as YAML, with all defaults filled in."""
    spec = job.spec.model_dump(mode="json", exclude_none=True)
    return Response(yaml.safe_dump(spec, sort_keys=False, allow_unicode=True), media_type=YAML)


def _invalid(*mistakes: Mistake) -> Validation:
    return Validation(valid=False, errors=list(mistakes), warnings=[], spec=None)


def _mistake(error: SpecError) -> Mistake:
    path = str(error.details.get("field", ""))
    message = error.message.removeprefix(f"{path}: ")
    return Mistake(path=path, message=message, remedy=error.remedy)
