"""Routes for job files: their schema, their validation, and the file of a submitted job."""

from __future__ import annotations

from typing import Any

import yaml
from fastapi import APIRouter, Response
from pydantic import ValidationError

from vcasgd.api.access import READ
from vcasgd.api.dependencies import JobsDep
from vcasgd.api.problems import documented
from vcasgd.errors import SpecError
from vcasgd.schemas.jobs import JobText, Mistake, Validation
from vcasgd.spec.job import JobSpec, load_job_mapping
from vcasgd.spec.problems import spec_errors
from vcasgd.spec.stability import unstable_settings

router = APIRouter(tags=["spec"])

YAML = "application/yaml"
#: Most mistakes in a response; nobody corrects more at a time.
MAX_MISTAKES = 50

_YAML: dict[int | str, dict[str, Any]] = {
    200: {"description": "A job file.", "content": {YAML: {"schema": {"type": "string"}}}}
}


@router.post("/jobs/validate", dependencies=READ, responses=documented(413))
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
        Mistake(
            path=setting.field,
            message=setting.message,
            remedy=setting.remedy,
        )
        for setting in unstable_settings(spec)
    ]
    return Validation(valid=True, errors=[], warnings=warnings, spec=spec)


@router.get("/schema/job", dependencies=READ)
def get_job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file."""
    return JobSpec.model_json_schema()


@router.get(
    "/jobs/{job}/spec",
    dependencies=READ,
    response_class=Response,
    responses=_YAML | documented(404),
)
def get_job_spec(jobs: JobsDep, job: str) -> Response:
    """Return the job as YAML, with all defaults filled in."""
    spec = jobs.get(job).spec.model_dump(mode="json", exclude_none=True)
    return Response(yaml.safe_dump(spec, sort_keys=False, allow_unicode=True), media_type=YAML)


def _invalid(*mistakes: Mistake) -> Validation:
    return Validation(valid=False, errors=list(mistakes), warnings=[], spec=None)


def _mistake(error: SpecError) -> Mistake:
    path = str(error.details.get("field", ""))
    message = error.message.removeprefix(f"{path}: ")
    return Mistake(path=path, message=message, remedy=error.remedy)
