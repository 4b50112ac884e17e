"""Base classes of all schemas."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from vcasgd.printable import printable
from vcasgd.spec.job import JobSpec
from vcasgd.spec.values import check_plain

#: Longest name of a machine, a metric, or a kind of notice.
MAX_NAME_LENGTH = 255
#: Largest number; far beyond any real value, and safe to calculate with.
LARGEST_NUMBER = 1e15

#: Fields that workers report. Some JSON parsers round larger integers.
Count = Annotated[int, Field(ge=0, lt=2**53)]
Number = Annotated[float, Field(ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH), AfterValidator(printable)]


def finite(value: Any) -> Any:
    """Return ``value`` with None for each NaN and infinity, which JSON cannot express."""
    match value:
        case dict():
            return {name: finite(each) for name, each in value.items()}
        case list():
            return [finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
    return value


class Schema(BaseModel):
    """Immutable part of a response. Unknown fields, which a newer API may send, are dropped.

    A field that older APIs lack has a default; the API itself always sends every field.
    """

    model_config = ConfigDict(
        frozen=True, from_attributes=True, json_schema_serialization_defaults_required=True
    )


class Row(Schema):
    """Entry of a listing that another process wrote, possibly in another version.

    Unknown fields are kept, missing ones are null.
    """

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        return finite(value)


class RequestBody(BaseModel):
    """Body of a request. Unknown fields are refused, and data larger than the limits."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        # each field has its own rules about infinite numbers, and names itself in the error
        check_plain(value, finite=False)
        return value


def _tolerant(value: Any) -> Any:
    return JobSpec.model_validate(value, extra="ignore") if isinstance(value, dict) else value


#: A job's specification in a response; unlike a job file, it may have fields of a newer version.
ReportedSpec = Annotated[JobSpec, BeforeValidator(_tolerant)]
