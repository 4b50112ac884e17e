"""Jobs: submit, look, command."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Query, Response, status
from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from vcasgd.api.problems import documented
from vcasgd.api.routes.packages import DIGEST, name_of
from vcasgd.api.services import Here, Services
from vcasgd.api.views import JobView
from vcasgd.errors import SpecError
from vcasgd.spec.job import JobSpec
from vcasgd.store.ledger.job import JobState

router = APIRouter(tags=["jobs"])

#: the spec's own words for what is wrong, instead of pydantic's
Submitted = Annotated[JobSpec, PlainValidator(JobSpec.parse, json_schema_input_type=JobSpec)]

IdempotencyKey = Annotated[
    str | None,
    Header(min_length=1, max_length=200, pattern=r"^[\x20-\x7e]+$"),
]


class Resumption(BaseModel):
    """With which budget the job goes on; without one it has the budget that it had."""

    model_config = ConfigDict(extra="forbid")

    max_cost_usd: float | None = Field(default=None, gt=0, allow_inf_nan=False)


Change = Annotated[Resumption | None, Body()]


class Submission(BaseModel):
    """A job and the digest of the package that holds its code."""

    model_config = ConfigDict(extra="forbid")

    spec: Submitted
    package: str = Field(pattern=DIGEST, description="SHA-256 of an uploaded package")


_KNOWN: dict[int | str, dict[str, Any]] = {
    200: {"model": JobView, "description": "This key made this job before."}
}


@router.post(
    "/jobs",
    status_code=status.HTTP_201_CREATED,
    responses=_KNOWN | documented(409),
)
def submit_job(
    here: Here, response: Response, body: Submission, idempotency_key: IdempotencyKey = None
) -> JobView:
    """Creates a job; the same `Idempotency-Key` again gives the same job."""
    _check_package(here, body.package)
    _check_pools(here, body.spec)
    _check_labels(here, body.spec)
    job, created = here.jobs.submit_once(body.spec, body.package, idempotency_key)
    response.headers["Location"] = f"/api/v1/jobs/{job.id}"
    if not created:
        response.status_code = status.HTTP_200_OK
    return JobView.of(job)


def _check_package(here: Services, digest: str) -> None:
    if not here.storage.has(name_of(digest)):
        raise SpecError(
            f"package: {digest[:12]}… is not uploaded",
            remedy=f"PUT it to /api/v1/packages/{digest}",
            field="package",
        )


def _check_pools(here: Services, spec: JobSpec) -> None:
    """As far as a controller has told which pools there are."""
    known = here.control.pools().keys()
    unknown = [pool for pool in spec.workers.pools if pool not in known]
    if known and unknown:
        raise SpecError(
            f"workers.pools: there is no pool {unknown[0]!r}",
            remedy=f"choose from {', '.join(sorted(known))}",
            field="workers.pools",
        )


def _check_labels(here: Services, spec: JobSpec) -> None:
    """One pool at least must be allowed to see all that the job is."""
    wanted, known = set(spec.required_labels), here.control.pools()
    rows = [known[pool] for pool in spec.workers.pools if pool in known]
    if wanted and rows and not any(wanted <= set(row.get("labels") or ()) for row in rows):
        raise SpecError(
            f"labels: none of the pools {', '.join(spec.workers.pools)} may see all of "
            f"{', '.join(sorted(wanted))}",
            remedy="name a pool that may; vcasgd plan shows why each is excluded",
            field="labels",
        )


@router.get("/jobs")
def list_jobs(
    here: Here,
    state: JobState | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[JobView]:
    """Newest first."""
    states = tuple(JobState) if state is None else (state,)
    return [JobView.of(job) for job in here.jobs.all(states, limit)]


@router.get("/jobs/{job}", responses=documented(404))
def get_job(here: Here, job: str) -> JobView:
    return JobView.of(here.jobs.get(job))


@router.post("/jobs/{job}/pause", responses=documented(404, 409))
def pause_job(here: Here, job: str) -> JobView:
    """Possible while it is running; its workers push what they have and leave."""
    return JobView.of(here.jobs.pause(job))


@router.post("/jobs/{job}/resume", responses=documented(404, 409))
def resume_job(here: Here, job: str, change: Change = None) -> JobView:
    """Possible while it is paused."""
    return JobView.of(here.jobs.resume(job, max_cost_usd=change.max_cost_usd if change else None))


@router.post("/jobs/{job}/cancel", responses=documented(404, 409))
def cancel_job(here: Here, job: str) -> JobView:
    """Possible until it is over."""
    return JobView.of(here.jobs.cancel(job))
