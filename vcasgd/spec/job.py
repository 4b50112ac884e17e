"""What a job may ask for: ``job.yaml`` and the body of ``POST /api/v1/jobs`` in one model.

A field that is not listed here is refused, so that a misspelt setting is never silently
ignored. All durations accept seconds (``90``) or a number with a unit (``30s``, ``5m``,
``6h``, ``2d``).
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from vcasgd.errors import SpecError
from vcasgd.spec.strict import StrictModel
from vcasgd.spec.tuning import Tuning
from vcasgd.spec.update import RULES, Update, VcAsgdSpec
from vcasgd.spec.yaml import load_mapping

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION_SCHEMA = {
    "anyOf": [
        {"type": "number", "exclusiveMinimum": 0, "description": "seconds"},
        {"type": "string", "pattern": r"^\d+(\.\d+)?[smhd]?$", "examples": ["5m"]},
    ]
}


def parse_duration(value: object) -> timedelta:
    """Seconds as a number, or text such as ``5m``, to :class:`~datetime.timedelta`.

    Raises :class:`ValueError` for what is neither, not above 0, or longer than a timedelta.
    """
    try:
        length = value if isinstance(value, timedelta) else timedelta(seconds=_seconds(value))
    except OverflowError as error:
        raise ValueError(f"{value!r} is too long") from error
    if length <= timedelta(0):
        raise ValueError(f"must be longer than 0 seconds; not {value!r}")
    return length


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", value if type(value) is str else "")
    if match is None:
        raise ValueError(
            f"{value!r} is not a duration; write a number of seconds or for example 30s, 5m, 6h, 2d"
        )
    return float(match[1]) * _UNITS[match[2] or "s"]


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(lambda value: value.total_seconds(), return_type=float),
    WithJsonSchema(_DURATION_SCHEMA, mode="validation"),
]


def _push_interval(value: object) -> object:
    if value == "subtask" or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"must be a number of local steps above 0 or the word subtask; not {value!r}")


#: what data is, as far as the places are concerned that may see it: ``confidential``, ``eu-only``
Label = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


def _set_of_labels(value: object) -> object:
    if isinstance(value, list | tuple | set | frozenset) and all(type(one) is str for one in value):
        return tuple(sorted(set(value)))
    raise ValueError(f"must be a list of labels such as [confidential, eu-only]; not {value!r}")


#: in order, each once
Labels = Annotated[tuple[Label, ...], BeforeValidator(_set_of_labels)]


class Workers(StrictModel):
    """How many machines the job wants, and from which pools, in order of preference.

    ``fallback: on-demand``: once all spot pools have refused for ``fallback_after``, the minimum
    is bought without the risk. ``on_demand_min``: so many are, from the beginning.
    """

    min: int = Field(default=1, ge=0, le=10_000, strict=True)
    max: int = Field(default=4, ge=1, le=10_000, strict=True)
    pools: tuple[str, ...] = Field(default=("local",), min_length=1)
    fallback: Literal["on-demand"] | None = None
    fallback_after: Duration = Field(
        default=timedelta(minutes=5), json_schema_extra={"default": 300}
    )
    on_demand_min: int = Field(default=0, ge=0, le=10_000, strict=True)
    max_price_per_hour: float | None = Field(
        default=None, gt=0, strict=True, description="USD, of one machine"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Workers:
        for name in ("min", "on_demand_min"):
            if getattr(self, name) > self.max:
                raise ValueError(f"{name} ({getattr(self, name)}) is larger than max ({self.max})")
        return self


class Data(StrictModel):
    """What the task reads: ``labels`` bound it to pools that may see all of them."""

    labels: Labels = ()


class Checkpoint(StrictModel):
    """When to write checkpoints beside those at the end of each epoch, and how many to keep."""

    every: Duration = Field(default=timedelta(minutes=5), json_schema_extra={"default": 300})
    keep: int = Field(default=3, ge=1, le=1000, strict=True)


class Metric(StrictModel):
    """A validation metric that ranks a job's epochs, and optionally the value that ends the job.

    ``name`` is a key of the result of the task's ``evaluate``. ``mode`` says whether lower
    (``min``) or higher (``max``) values are better.
    """

    name: str = Field(min_length=1, max_length=100)
    mode: Literal["min", "max"]
    target: float | None = Field(default=None, strict=True, allow_inf_nan=False)

    def quality(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric's value in one evaluation, with its sign set so that higher is better.

        A value that is not finite counts as worse than any other: minus infinity. None if the
        evaluation does not contain the metric.
        """
        if self.name not in metrics:
            return None
        value = metrics[self.name]
        if not math.isfinite(value):
            return -math.inf
        return value if self.mode == "max" else -value

    def reached_by(self, metrics: Mapping[str, float]) -> bool:
        """Return True if an evaluation is as good as ``target`` or better."""
        quality = self.quality(metrics)
        if self.target is None or quality is None:
            return False
        return quality >= (self.target if self.mode == "max" else -self.target)


#: Metrics that rank the epochs of a job whose specification names none, in order of preference.
DEFAULT_METRICS = (Metric(name="accuracy", mode="max"), Metric(name="loss", mode="min"))


class Stop(StrictModel):
    """Conditions that end the job before its last epoch, or pause it.

    ``metric`` names the validation metric that ranks epochs; the job ends when an epoch reaches
    its target. ``accuracy: 0.91`` is short for
    ``metric: {name: accuracy, mode: max, target: 0.91}``. The job is paused before its machines
    cost ``max_cost_usd``.
    """

    accuracy: float | None = Field(default=None, gt=0, le=1, strict=True)
    metric: Metric | None = None
    max_cost_usd: float | None = Field(default=None, gt=0, strict=True)
    max_duration: Duration | None = None

    @model_validator(mode="after")
    def _one_metric(self) -> Stop:
        if self.accuracy is not None and self.metric is not None:
            raise ValueError("accuracy and metric are both set; remove one of them")
        return self

    @property
    def chosen_metric(self) -> Metric | None:
        """The metric that the specification names, or None."""
        if self.accuracy is not None:
            return Metric(name="accuracy", mode="max", target=self.accuracy)
        return self.metric


class JobSpec(StrictModel):
    """One training run, as the user asks for it."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    task: str = Field(
        pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|([\w-][\w.-]*/)*[\w-][\w.-]*\.py)$",
        description="module:Class, or the path of a script",
    )
    working_dir: str = "."
    args: dict[str, Any] = Field(default_factory=dict)
    epochs: int = Field(ge=1, le=1_000_000, strict=True)
    subtasks_per_epoch: int = Field(ge=1, le=1_000_000, strict=True)
    push_every: Annotated[
        Literal["subtask"] | Annotated[int, Field(ge=1)], BeforeValidator(_push_interval)
    ] = "subtask"
    optimizer_state: Literal["reset", "keep"] = Field(
        default="reset", description="of the local optimizer, between two subtasks of a worker"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, strict=True)
    max_epoch_lead: int = Field(default=1, ge=0, le=100, strict=True)
    update: Update = VcAsgdSpec()
    tuning: Tuning = Tuning()
    workers: Workers = Workers()
    checkpoint: Checkpoint = Checkpoint()
    stop: Stop = Stop()
    labels: Labels = Field(default=(), description="of the job's code and model")
    data: Data = Data()

    @model_validator(mode="before")
    @classmethod
    def _default_rule(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("update"), dict):
            return {**value, "update": {"rule": "vc-asgd", **value["update"]}}
        return value

    @field_validator("args")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        """The arguments travel as JSON, and must not arrive as something else."""
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise ValueError(
                "may hold text, finite numbers, booleans, nulls, lists and mappings with text as "
                "keys; put quotes around anything else, such as a date"
            )
        return value

    @property
    def total_subtasks(self) -> int:
        return self.epochs * self.subtasks_per_epoch

    @property
    def required_labels(self) -> tuple[str, ...]:
        """All that a pool must be cleared for to work on the job, in order."""
        return tuple(sorted({*self.labels, *self.data.labels}))

    @classmethod
    def parse(cls, value: object) -> JobSpec:
        """From plain data. Raises :class:`SpecError` that names the first wrong field."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise spec_error(error, cls) from error

    @classmethod
    def load(cls, path: Path) -> JobSpec:
        """From a YAML file; a relative ``working_dir`` is taken from the file's folder."""
        value = load_job_mapping(path)
        try:
            spec = cls.parse(value)
        except SpecError as error:
            raise SpecError(
                f"{path}: {error.message}", remedy=error.remedy, **error.details
            ) from error
        return spec.model_copy(
            update={"working_dir": str((path.parent / spec.working_dir).resolve())}
        )


def load_job_mapping(source: str | Path) -> dict[str, Any]:
    """Return the fields of a job file, or of its text, unchecked. Raises :class:`SpecError`."""
    remedy = "write at least name, task, epochs and subtasks_per_epoch"
    return load_mapping(source, "a job", remedy=remedy)


def spec_error(error: ValidationError, model: type[BaseModel] = JobSpec) -> SpecError:
    """A pydantic error as ours: names the first wrong field, counts the others."""
    first, *others = spec_errors(error, model)
    more = f" (and {len(others)} more)" if others else ""
    return SpecError(f"{first.message}{more}", remedy=first.remedy, **first.details)


def spec_errors(error: ValidationError, model: type[BaseModel] = JobSpec) -> list[SpecError]:
    """One of ours for each field that is wrong."""
    return [_spec_error(each, model) for each in error.errors(include_url=False)]


def _spec_error(wrong: ErrorDetails, model: type[BaseModel]) -> SpecError:
    path = wrong["loc"]
    # pydantic puts the tag of a discriminated union into the path; the user wrote no such level
    field = ".".join(str(part) for part in path if part not in RULES and part != "[key]")
    remedy = None
    match wrong["type"]:
        case "extra_forbidden":
            message = "there is no such field"
            remedy = f"known fields: {', '.join(sorted(_fields_at(model, path[:-1])))}"
        case "union_tag_invalid":
            field = f"{field}.rule"
            message = f"unknown rule {wrong['ctx']['tag']!r}"
            remedy = f"choose one of {wrong['ctx']['expected_tags']}"
        case "missing":
            message = "is required"
        case "dict_type" | "model_type" | "model_attributes_type":
            message = f"must be a mapping of fields, not {_short(wrong['input'])}"
        case "tuple_type" | "too_short":
            message = f"must be a list of at least one, not {_short(wrong['input'])}"
        case "string_pattern_mismatch" if field == "task":
            message = f"{wrong['input']!r} is neither module:Class nor a script of working_dir"
            remedy = "for example train:MyTask, or train.py"
        case "string_pattern_mismatch" if field == "name":
            message = f"{wrong['input']!r} is not a name"
            remedy = "use up to 63 lower-case letters, digits and dashes"
        case "value_error":
            message = wrong["msg"].removeprefix("Value error, ")
        case _:
            wanted = wrong["msg"].replace("Input should be", "must be")
            message = f"{wanted}; not {_short(wrong['input'])}"
    field = field or "job"
    return SpecError(f"{field}: {message}", remedy=remedy, field=field)


def _fields_at(model: Any, path: tuple[str | int, ...]) -> Iterable[str]:
    """The fields of the part of a model that a path leads to."""
    for part in path:
        annotation = RULES.get(part) or model.model_fields[part].annotation
        # An optional section is a union with None.
        model = next((each for each in get_args(annotation) if each is not type(None)), annotation)
    fields: dict[str, Any] = model.model_fields
    return fields


def _short(value: object) -> str:
    return textwrap.shorten(repr(value), 60, placeholder=" …")
