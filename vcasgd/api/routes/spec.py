"""What a job may say: its schema, whether a text is one, and what a job said."""

from __future__ import annotations

from typing import Any

import yaml
from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vcasgd.api.problems import documented
from vcasgd.api.services import Here
from vcasgd.errors import SpecError
from vcasgd.spec.job import JobSpec, load_job_mapping, spec_errors

router = APIRouter(tags=["spec"])

YAML = "application/yaml"
#: a job file has some dozens of lines
LONGEST_YAML = 100_000
#: nobody mends more at a time
MOST_MISTAKES = 50

_YAML: dict[int | str, dict[str, Any]] = {
    200: {"description": "As in job.yaml.", "content": {YAML: {"schema": {"type": "string"}}}}
}


class Text(BaseModel):
    """A job file."""

    model_config = ConfigDict(extra="forbid")

    yaml: str = Field(max_length=LONGEST_YAML)


class Mistake(BaseModel):
    """`path`: of the wrong field, parts separated by dots; empty where it is the whole file.
    `line`: from 1, where it is known."""

    path: str
    message: str
    remedy: str | None = None
    line: int | None = None


class Validation(BaseModel):
    """`spec`: the job with all that it did not say filled in; `null` where it is none."""

    valid: bool
    errors: list[Mistake]
    spec: JobSpec | None


@router.post("/jobs/validate")
def validate_job(body: Text) -> Validation:
    """Whether a text is a job file, and if not, what is wrong with it."""
    try:
        spec = JobSpec.model_validate(load_job_mapping(body.yaml))
    except SpecError as error:
        line = error.details.get("line")
        mistake = Mistake(path="", message=error.message, remedy=error.remedy, line=line)
        return _invalid(mistake)
    except ValidationError as error:
        return _invalid(*map(_mistake, spec_errors(error)[:MOST_MISTAKES]))
    return Validation(valid=True, errors=[], spec=spec)


@router.get("/schema/job")
def get_job_schema() -> dict[str, Any]:
    """The JSON schema of a job file."""
    return JobSpec.model_json_schema()


@router.get("/jobs/{job}/spec", response_class=Response, responses=_YAML | documented(404))
def get_job_spec(here: Here, job: str) -> Response:
    """The job as YAML, with all that it did not say filled in."""
    spec = here.jobs.get(job).spec.model_dump(mode="json", exclude_none=True)
    return Response(yaml.safe_dump(spec, sort_keys=False, allow_unicode=True), media_type=YAML)


def _invalid(*mistakes: Mistake) -> Validation:
    return Validation(valid=False, errors=list(mistakes), spec=None)


def _mistake(error: SpecError) -> Mistake:
    path = str(error.details.get("field", ""))
    message = error.message.removeprefix(f"{path}: ")
    return Mistake(path=path, message=message, remedy=error.remedy)
