"""The specification of a job: ``job.yaml``, and the body of ``POST /api/v1/jobs``.

Unknown fields are errors, so that a misspelled setting is never silently ignored. Durations are
seconds (``90``) or a number with a unit (``30s``, ``5m``, ``6h``, ``2d``).
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from vcasgd.errors import SpecError
from vcasgd.spec.environment import Commands, Environment, RequirementsFile, Secrets
from vcasgd.spec.problems import spec_error
from vcasgd.spec.sections import (
    BaseSpec,
    EmaOrDecay,
    Evaluate,
    Resources,
    StartFrom,
    Stop,
    Tracks,
    Tuning,
)
from vcasgd.spec.update import RoundsSpec, SmaSpec, Update
from vcasgd.spec.values import Duration, Moment, StrictModel, check_plain, described
from vcasgd.spec.yaml import load_mapping


def _push_interval(value: object) -> object:
    if value in (None, "subtask") or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"must be a number of local steps above 0 or the word subtask; not {value!r}")


def _max_bad_samples(value: object) -> object:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (0 < value < 1 or (type(value) is int and 1 <= value <= MAX_SAMPLES)):  # type: ignore[operator]
        return value
    raise ValueError(
        f"must be a whole number of samples, or a share between 0 and 1; not {value!r}"
    )


MaxBadSamples = Annotated[int | float, BeforeValidator(_max_bad_samples)]

#: Most subtasks per epoch, samples of a job, and steps of a job.
MAX_SUBTASKS, MAX_SAMPLES, MAX_STEPS = 1_000_000, 10**15, 10**9
#: Letters of a job's name, and what separates that of a sweep's job from the rest.
MAX_NAME, MEMBER = 63, "--"
#: Fields for the length of a job, one of which it sets.
LENGTHS = ("epochs", "max_samples", "max_steps")

#: Local steps of a round by default, until the workers have measured how long an exchange takes.
ROUND_STEPS = 2

#: Priorities of jobs, and their order in the plan of the fleet.
PRIORITIES = {"low": -1, "normal": 0, "high": 1}
#: Fields that can change until the job ends.
CHANGEABLE = ("priority", "weight")
Priority = Literal["low", "normal", "high"]
#: Machines in relation to other jobs of the same priority.
Weight = Annotated[float, Field(ge=0.01, le=100, strict=True, allow_inf_nan=False)]

#: A requirement on the pools that may process the data, such as ``confidential`` or ``eu-only``.
_NAME = described(
    r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$",
    "up to 63 lowercase letters and digits, and dashes between them",
)
Label = Annotated[str, Field(pattern=_NAME)]


def _set_of_labels(value: object) -> object:
    if isinstance(value, list | tuple | set | frozenset) and all(type(one) is str for one in value):
        return tuple(sorted(set(value)))
    raise ValueError(f"must be a list of labels such as [confidential, eu-only]; not {value!r}")


#: Sorted labels without duplicates.
Labels = Annotated[tuple[Label, ...], BeforeValidator(_set_of_labels)]


class JobState(StrEnum):
    """State of a job: ``starting`` → ``running`` ⇄ ``paused`` → ``finishing`` → a final state."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHING = "finishing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """True for the final states: ``succeeded``, ``failed``, ``cancelled``."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def phrase(self) -> str:
        """The state as a text has it after the name of a job: ``is running``, ``has failed``."""
        return f"{'has' if self in (JobState.SUCCEEDED, JobState.FAILED) else 'is'} {self}"


class Workers(StrictModel):
    """Number of machines, and the pools to get them from, in order of preference.

    ``fallback: on-demand`` buys ``min`` machines on demand once all spot pools have refused for
    ``fallback_after``. ``on_demand_min`` machines are on demand from the start.
    """

    min: int = Field(
        default=1,
        ge=0,
        le=10_000,
        strict=True,
        description="machines that the job gets before others get more than theirs, and keeps",
    )
    max: int = Field(
        default=4, ge=1, le=10_000, strict=True, description="most machines that the job uses"
    )
    gpus: Literal["all"] | Annotated[int, Field(ge=1, le=64, strict=True)] | None = Field(
        default=None,
        # Other versions know no null.
        exclude_if=lambda gpus: gpus is None,
        description="GPUs of a machine that train as one worker; processes on machines without "
        "GPUs; by default, the first machine chooses all or 1",
    )
    spare: int = Field(
        default=0,
        ge=0,
        le=1000,
        strict=True,
        description="further machines that run without work, and take the place of lost ones",
    )
    pools: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="where machines come from, in order of preference; by default all spot pools "
        "of the cluster that may see the job",
    )
    fallback: Literal["on-demand"] | None = Field(
        default=None, description="buys min machines on demand when all spot pools refuse"
    )
    fallback_after: Duration = Field(
        default=timedelta(minutes=5),
        json_schema_extra={"default": 300},
        description="how long all spot pools must have refused",
    )
    on_demand_min: int = Field(
        default=0,
        ge=0,
        le=10_000,
        strict=True,
        description="machines that are bought on demand from the start",
    )
    max_price_per_hour: float | None = Field(
        default=None,
        gt=0,
        strict=True,
        description="USD per machine; more expensive ones are excluded",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Workers:
        for name in ("min", "on_demand_min"):
            if getattr(self, name) > self.max:
                raise ValueError(f"{name} ({getattr(self, name)}) is larger than max ({self.max})")
        return self


class Data(StrictModel):
    """The data of the task. ``labels`` restrict it to pools that are cleared for all of them."""

    labels: Labels = Field(
        default=(), description="labels that a pool must be cleared for to see the data"
    )


class Checkpoint(StrictModel):
    """Interval of checkpoints, in addition to those of evaluated models, and how many to keep."""

    every: Duration = Field(
        default=timedelta(minutes=5),
        json_schema_extra={"default": 300},
        description="time between two checkpoints, besides those of evaluated models",
    )
    keep: int = Field(
        default=3,
        ge=1,
        le=1000,
        strict=True,
        description="newest checkpoints to keep; the best one is kept in addition",
    )


class _Constructor(type(StrictModel)):  # type: ignore[misc]
    """Makes ``JobSpec(epochs=-1)`` raise the error of a job file instead of pydantic's."""

    def __call__(cls, **fields: Any) -> Any:
        try:
            return super().__call__(**fields)
        except ValidationError as error:
            raise spec_error(error, cls) from error


class JobSpec(StrictModel, metaclass=_Constructor):
    """The specification of one training run. Raises :class:`SpecError` for a wrong field."""

    name: str = Field(
        pattern=_NAME,
        description="up to 63 lowercase letters, digits, and dashes; the job's ID is this name and "
        "six more characters",
    )
    task: str = Field(
        pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|([\w-][\w.-]*/)*[\w-][\w.-]*\.py)$",
        description="module:Class, or the path of a script in working_dir",
    )
    working_dir: str = Field(
        default=".",
        description="folder with your code, relative to the file; sent to the workers as a zip",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the task's class, as JSON values; for a script, its "
        "command line",
    )
    env: Environment = Field(
        default={}, description="environment variables of the workers; everyone can read them"
    )
    secrets: Secrets = Field(
        default={}, description="secret variables of the workers, and where their values come from"
    )
    requirements: RequirementsFile | None = Field(
        default=None, description="file in working_dir with Python packages to install"
    )
    setup: Commands = Field(
        default=(), description="shell commands to run on each machine before the first worker"
    )
    base: BaseSpec | None = Field(
        default=None, description="weights that each machine loads itself, from vcasgd.base()"
    )
    start_from: StartFrom | None = Field(
        default=None,
        description="weights to start with: of another job, such as digits-abc123/best, or of a "
        "safetensors file in working_dir",
    )
    epochs: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        strict=True,
        description="passes over the data; exactly one of epochs, max_samples, and max_steps",
    )
    max_samples: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SAMPLES,
        strict=True,
        description="samples to apply, over all epochs, instead of epochs",
    )
    max_steps: int | None = Field(
        default=None,
        ge=1,
        le=MAX_STEPS,
        strict=True,
        description="batches of the task's batch_size to apply, instead of epochs",
    )
    subtasks_per_epoch: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SUBTASKS,
        strict=True,
        description="leases per epoch; chosen from the number of samples if not set",
    )
    push_every: Annotated[
        Literal["subtask"] | Annotated[int, Field(ge=1)] | None, BeforeValidator(_push_interval)
    ] = Field(
        default=None,
        description="local steps between two pushes; by default a subtask or, with the rule "
        "rounds, about as many as take as long as an exchange",
    )
    optimizer_state: Literal["reset", "keep"] | None = Field(
        default=None,
        description="state of the local optimizer at the start of a subtask; kept with the rule "
        "rounds, otherwise reset",
    )
    on_bad_sample: Literal["fail", "skip"] = Field(
        default="fail",
        description="what to do with a sample that can't be loaded, or whose loss or gradient "
        "isn't finite",
    )
    max_bad_samples: MaxBadSamples = Field(
        default=0.01,
        description="most skipped samples, as a number or as a share of the job's samples; more "
        "fail the job",
    )
    batch: Literal["job", "worker"] = Field(
        default="job",
        description="with the rule rounds: workers share each batch of the task's batch_size, or "
        "each worker has whole ones, so that K workers make one step where one makes K",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**32,
        strict=True,
        description="seed of the model, the sample order, and the workers' random numbers",
    )
    max_epoch_lead: int = Field(
        default=1,
        ge=0,
        le=100,
        strict=True,
        description="epochs beyond the slowest unfinished one that workers can lease",
    )
    update: Update = Field(default=RoundsSpec(), description="how updates are blended and encoded")
    tuning: Tuning = Field(default=Tuning(), description="settings tuned from measurements")
    workers: Workers = Field(default=Workers(), description="number and kind of machines")
    resources: Resources | None = Field(
        default=None,
        description="what each machine has at least, which chooses pools and machine types",
    )
    finish_by: Moment | None = Field(
        default=None, description="deadline; machines on demand are bought when it needs them"
    )
    within: Duration | None = Field(
        default=None, description="the deadline as a duration from the submission"
    )
    priority: Priority = Field(
        default="normal", description="jobs of a higher priority get machines first"
    )
    weight: Weight = Field(
        default=1.0, description="share of the machines among jobs of the same priority"
    )
    checkpoint: Checkpoint = Field(
        default=Checkpoint(), description="how often the model is stored, and how many are kept"
    )
    evaluate: Evaluate = Field(default=Evaluate(), description="when the model is evaluated")
    ema: EmaOrDecay = Field(
        default=None,
        description="moving average of the parameters: its decay in each step, or a mapping",
    )
    stop: Stop = Field(
        default=Stop(), description="what ranks models, ends the job early, or pauses it"
    )
    track: Tracks = Field(
        default=(), description="trackers to which the job is exported while it runs"
    )
    labels: Labels = Field(default=(), description="labels of the job's code and model")
    data: Data = Field(default=Data(), description="the data of the task")

    @model_validator(mode="before")
    @classmethod
    def _default_rule(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("update"), dict):
            return {**value, "update": {"rule": "rounds", **value["update"]}}
        return value

    @model_validator(mode="after")
    def _one_length(self) -> JobSpec:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) == 1:
            return self
        field, problem, remedy = (
            (given[1], f"can't be set together with {given[0]}", "remove one of them")
            if given
            else ("epochs", "is required", f"set one of {', '.join(LENGTHS)}")
        )
        details = {"field": field, "problem": problem, "remedy": remedy}
        raise PydanticCustomError("length", "{field}: {problem}", details)

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if self.finish_by is not None and self.within is not None:
            raise ValueError("finish_by and within are both set; remove one of them")
        if self.ema is not None and isinstance(self.update, SmaSpec):
            raise ValueError("ema can't be combined with the rule sma, which averages itself")
        if both := sorted(self.env.keys() & self.secrets.keys()):
            raise ValueError(f"{both[0]} is in env and in secrets; remove it from one of them")
        together, asked = self.workers.gpus, self.resources and self.resources.gpus
        if self.skips_bad_samples and together not in (None, 1):
            raise ValueError("on_bad_sample: skip can't be combined with workers.gpus; set it to 1")
        if isinstance(together, int) and asked and asked < together:
            raise ValueError(
                f"workers.gpus: {together} GPUs train as one worker, and resources.gpus asks for "
                f"machines with {asked}; raise resources.gpus"
            )
        return self

    @field_validator("args")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Raise ValueError for arguments that JSON would change, or that are too large."""
        check_plain(value, level=2)
        return value

    def with_gpus(self, gpus: Literal["all", 1]) -> JobSpec:
        """Return the job with these GPUs of a machine as a worker, unless it names some."""
        if self.workers.gpus is not None:
            return self
        workers = self.workers.model_copy(update={"gpus": gpus})
        return self.model_copy(update={"workers": workers})

    @property
    def push_interval(self) -> int | Literal["subtask"]:
        """Local steps between two pushes, or one push for each subtask.

        With rounds and without ``push_every``, those of the first round.
        """
        if self.push_every is not None:
            return self.push_every
        return ROUND_STEPS if isinstance(self.update, RoundsSpec) else "subtask"

    @property
    def keeps_optimizer(self) -> bool:
        """True if a local optimizer keeps its state from one subtask to the next."""
        if self.optimizer_state is not None:
            return self.optimizer_state == "keep"
        return isinstance(self.update, RoundsSpec)

    @property
    def skips_bad_samples(self) -> bool:
        """True if samples that can't be trained are skipped."""
        return self.on_bad_sample == "skip"

    def most_bad_samples(self, total: int) -> int:
        """Return how many samples of a job of ``total`` samples may be skipped."""
        most = self.max_bad_samples
        return int(most * total) if most < 1 else int(most)

    def deadline(self, submitted: float) -> float | None:
        """Return when the job has to end, in Unix seconds as the time of its submission."""
        if self.within is not None:
            return submitted + self.within.total_seconds()
        return None if self.finish_by is None else self.finish_by.timestamp()

    @property
    def known_subtasks(self) -> int | None:
        """Number of subtasks in all epochs, or None if it depends on the data."""
        if self.epochs is None or self.subtasks_per_epoch is None:
            return None
        return self.epochs * self.subtasks_per_epoch

    @property
    def length(self) -> str:
        """The length of the job, such as ``10 epochs``."""
        name = next(name for name in LENGTHS if getattr(self, name) is not None)
        number, unit = getattr(self, name), name.removeprefix("max_")
        return f"{number} {unit if number > 1 else unit.removesuffix('s')}"

    @property
    def required_labels(self) -> tuple[str, ...]:
        """Sorted labels that a pool must be cleared for to work on the job."""
        return tuple(sorted({*self.labels, *self.data.labels}))

    @classmethod
    def parse(cls, value: object) -> JobSpec:
        """Parse plain data. Raises :class:`SpecError`, which names the first invalid field."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise spec_error(error, cls) from error

    @classmethod
    def load(cls, path: Path) -> JobSpec:
        """Load a YAML file. A relative ``working_dir`` is relative to the file's folder.

        Raises :class:`SpecError`.
        """
        value = load_job_mapping(path)
        try:
            spec = cls.parse(value)
        except SpecError as error:
            raise SpecError(
                f"{path}: {error.message}", remedy=error.remedy, **error.details
            ) from error
        return spec.located(path.parent)

    def located(self, folder: Path) -> JobSpec:
        """Return a copy with absolute local paths, which are relative to ``folder`` now."""
        secrets = {
            name: source.model_copy(
                update={"file": str((folder / Path(source.file).expanduser()).resolve())}
            )
            if source.file
            else source
            for name, source in self.secrets.items()
        }
        working_dir = str((folder / self.working_dir).resolve())
        return self.model_copy(update={"working_dir": working_dir, "secrets": secrets})


def load_job_mapping(source: str | Path) -> dict[str, Any]:
    """Return the fields of a job file, or of its text, unchecked. Raises :class:`SpecError`."""
    remedy = "write at least name, task, and epochs, max_samples, or max_steps"
    return load_mapping(source, "a job", remedy=remedy)
