"""Sections of a job file: base, evaluation, end, trackers, and tuning."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from vcasgd.spec.values import (
    DIGEST_PATTERN,
    Duration,
    Size,
    StrictModel,
    described,
    parse_duration,
)

#: Name of a list of files, as ``sha256sum`` writes it. It makes the base the folder of these files.
LIST_NAME = "SHA256SUMS"
SCHEMES = ("s3", "gs", "https", "http", "file")


class BaseSpec(StrictModel):
    """Weights that don't change during training, as a file with this digest.

    If the file's name is ``SHA256SUMS``, the base is the folder of the files that it lists.
    """

    location: str = Field(
        max_length=2000,
        description="s3://…, gs://…, https://…, or an absolute path on the machines",
    )
    sha256: str = Field(
        pattern=DIGEST_PATTERN, description="digest of the file, as sha256sum prints it"
    )

    @field_validator("location")
    @classmethod
    def _supported(cls, value: str) -> str:
        parts = urlsplit(value)
        if not (value.startswith("/") or parts.scheme in SCHEMES):
            raise ValueError(f"must be s3://…, gs://…, https://…, or an absolute path; not {value}")
        if not PurePosixPath(parts.path).name or value.endswith("/"):
            raise ValueError(f"must name a file, which can be a list such as …/{LIST_NAME}")
        if parts.username or parts.password or parts.query:
            raise ValueError("can't contain a password or a query: job files are not secret")
        return value

    @property
    def is_folder(self) -> bool:
        """True if the file lists those of a folder."""
        return PurePosixPath(urlsplit(self.location).path).name == LIST_NAME


class StartFrom(StrictModel):
    """Weights that a job starts with instead of those that ``Task.model`` returns.

    They are those of a checkpoint of another ``job``, a name, a version, ``best``, or ``last``, by
    default the best one if a metric ranks that job's models; or those of a safetensors ``file``
    in ``working_dir``. In short: ``start_from: digits-abc123``, ``digits-abc123/last``, or
    ``weights.safetensors``.
    """

    job: str | None = Field(
        default=None,
        pattern=described(r"^[a-z0-9][a-z0-9-]{0,99}$", "the ID of a job, such as digits-abc123"),
        description="ID of a job",
    )
    checkpoint: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="best, last, or the version or name of a checkpoint; by default the best one",
    )
    file: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="safetensors file in working_dir, instead of a job",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        job, slash, checkpoint = value.partition("/")
        if value.endswith(".safetensors") and not checkpoint.startswith("v0"):
            return {"file": value}
        return {"job": job, "checkpoint": checkpoint if slash else None}

    @model_validator(mode="after")
    def _one_source(self) -> StartFrom:
        if (self.job is None) == (self.file is None):
            raise ValueError("must name a job or a file, for example digits-abc123/best")
        if self.file is not None:
            path = PurePosixPath(self.file)
            if self.checkpoint is not None or path.is_absolute() or ".." in path.parts:
                raise ValueError(f"must name a file in working_dir; not {self.file}")
        return self

    def __str__(self) -> str:
        return self.file or "/".join(filter(None, (self.job, self.checkpoint)))


#: Largest number of steps or samples between two evaluations.
MAX_INTERVAL = 10**15

_COUNT = re.compile(r"\s*(\d{1,16})\s*(step|sample)s?\s*")


@dataclass(frozen=True)
class EvaluationInterval:
    """Distance between two evaluations. ``count`` is 1 for epochs, whole except for seconds."""

    unit: Literal["epoch", "step", "sample", "second"]
    count: float


def parse_interval(text: str) -> EvaluationInterval:
    """Parse ``epoch``, a number of steps or samples, or a duration with a unit.

    Raises :class:`ValueError`.
    """
    if text.strip() == "epoch":
        return EvaluationInterval("epoch", 1)
    if match := _COUNT.fullmatch(text):
        if not 1 <= int(match[1]) <= MAX_INTERVAL:
            raise ValueError(f"must be from 1 to {MAX_INTERVAL:,} {match[2]}s; not {text!r}")
        return EvaluationInterval("step" if match[2] == "step" else "sample", int(match[1]))
    # A number without a unit could mean steps as well as seconds.
    if text.strip()[-1:].isalpha():
        try:
            return EvaluationInterval("second", parse_duration(text).total_seconds())
        except ValueError:
            pass
    raise ValueError(
        f"must be epoch, a number of steps or samples such as 500 steps, or a duration such as "
        f"10m; not {text!r}"
    )


def place_of(epoch: float, step: int | None) -> str:
    """Return the place of an evaluation: ``epoch 3``, or ``epoch 2.47, step 1200``."""
    if epoch == int(epoch):
        return f"epoch {epoch:.0f}"
    return f"epoch {epoch:.2f}" + ("" if step is None else f", step {step}")


def _interval(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(f"needs a unit, such as 500 steps, 10000 samples, or 10m; not {value!r}")
    parse_interval(value)
    return value


class Evaluate(StrictModel):
    """Interval between evaluations of the model, which is always evaluated at the end of the job.

    ``every`` is ``epoch``, a number of steps (``500 steps``, each of one batch) or samples
    (``100000 samples``), or a duration (``10m``).
    """

    every: Annotated[str, BeforeValidator(_interval)] = Field(
        default="epoch",
        description="epoch, a number of steps or samples, or a duration",
        examples=["epoch", "500 steps", "100000 samples", "10m"],
    )

    @property
    def interval(self) -> EvaluationInterval:
        """The distance between two evaluations."""
        return parse_interval(self.every)


_BEST_HIGH = ("f1", "auc", "acc", "bleu", "iou", "r2")
_BEST_LOW = ("perplexity", "error", "mse", "mae", "rmse", "wer")
_MODES = dict.fromkeys(("accuracy", *_BEST_HIGH), "max") | dict.fromkeys(
    ("loss", *_BEST_LOW), "min"
)


class Metric(StrictModel):
    """A validation metric that ranks a job's models, and optionally the value that ends the job.

    ``name`` is a key of the result of the task's ``evaluate``. ``mode`` says whether lower
    (``min``) or higher (``max``) values are better; it is known of usual names, such as ``loss``. A
    name alone is short for a mapping.
    """

    name: str = Field(
        min_length=1, max_length=100, description="key of the result of the task's evaluate"
    )
    mode: Literal["min", "max"] = Field(description="whether lower or higher values are better")
    target: float | None = Field(
        default=None, strict=True, allow_inf_nan=False, description="value that ends the job"
    )

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, value: Any) -> Any:
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, dict) or "mode" in given:
            return given
        mode = _MODES.get(str(given.get("name")))
        if mode is None and "name" in given:
            raise ValueError(
                f"whether lower or higher values of {given['name']} are better is not known; write "
                f"{{name: {given['name']}, mode: min}}, or mode: max"
            )
        return given if mode is None else {**given, "mode": mode}

    def quality(self, metrics: Mapping[str, float | None]) -> float | None:
        """Return the metric's value in one evaluation, with its sign set so that higher is better.

        A value that is not finite counts as worse than any other: minus infinity. None if the
        evaluation does not contain the metric.
        """
        if self.name not in metrics:
            return None
        value = metrics[self.name]
        if value is None or not math.isfinite(value):
            return -math.inf
        return value if self.mode == "max" else -value

    def reached_by(self, metrics: Mapping[str, float]) -> bool:
        """Return True if an evaluation is as good as ``target`` or better."""
        quality = self.quality(metrics)
        if self.target is None or quality is None:
            return False
        return quality >= (self.target if self.mode == "max" else -self.target)


#: Metrics that rank the models of a job whose specification names none, in order of preference.
DEFAULT_METRICS = (
    Metric(name="accuracy", mode="max"),
    Metric(name="loss", mode="min"),
    *(Metric(name=name, mode="max") for name in _BEST_HIGH),
    *(Metric(name=name, mode="min") for name in _BEST_LOW),
)


def metric_text(name: str, value: float | None) -> str:
    """Return a metric as people read it, such as ``accuracy 97.60%`` or ``loss 0.1234``."""
    if value is None:
        return f"{name} -"
    return f"{name} {value:.2%}" if name == "accuracy" else f"{name} {value:.4g}"


class Stop(StrictModel):
    """Conditions that end the job early, or pause it.

    ``metric`` names the validation metric that ranks the evaluated models; the job ends when one
    reaches its target. ``accuracy: 0.91`` is short for
    ``metric: {name: accuracy, mode: max, target: 0.91}``. After ``patience`` evaluations in a row
    without a better value, the job ends with its best model. The job is paused before its machines
    cost ``max_cost_usd``.
    """

    accuracy: float | None = Field(
        default=None,
        gt=0,
        le=1,
        strict=True,
        description="short for a metric with the name accuracy, the mode max, and this target",
    )
    metric: Metric | None = Field(
        default=None,
        description="metric that ranks evaluated models, also by its name alone; by default "
        "accuracy, else loss, else the first well-known name",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        strict=True,
        description="evaluations in a row without a better value of the metric, which end the job",
    )
    max_cost_usd: float | None = Field(
        default=None,
        gt=0,
        strict=True,
        description="pause the job before its machines cost this much",
    )
    max_duration: Duration | None = Field(
        default=None,
        description="time since training started, after which the job ends with the last "
        "evaluated model",
    )

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


class Ema(StrictModel):
    """An exponential moving average of the model's parameters, beside the model.

    Each step of the job multiplies it by ``decay`` and adds ``1 - decay`` times the parameters.
    Evaluations measure it ``beside`` the model, with names that start with ``ema_``, or
    ``instead`` of it.
    """

    decay: float = Field(gt=0, lt=1, strict=True, description="decay in each step")
    evaluate: Literal["beside", "instead"] = Field(
        default="beside", description="evaluate the average beside the model, or instead of it"
    )


#: Start of the names of an average's metrics beside those of the model.
EMA_PREFIX = "ema_"


def _ema(value: object) -> object:
    return {"decay": value} if isinstance(value, float) else value


EmaOrDecay = Annotated[Ema | None, BeforeValidator(_ema)]


#: Name of a GPU, or a part of it.
_GPU_TYPE = described(r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,49}$", "the name of a GPU, such as L4")
GpuType = Annotated[str, Field(pattern=_GPU_TYPE)]


class Resources(StrictModel):
    """Least hardware of each machine of a job. ``gpu_memory`` is that of one GPU.

    ``gpu_types``: the GPU's name has all words of one of these.
    """

    gpus: int | None = Field(default=None, ge=0, le=64, strict=True, description="number of GPUs")
    gpu_memory: Size | None = Field(default=None, description="memory of one GPU")
    cpus: float | None = Field(default=None, gt=0, le=100_000, description="processors")
    memory: Size | None = Field(default=None, description="memory of the machine")
    gpu_types: tuple[GpuType, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=50,
        description="kinds of GPUs, such as L4; the GPU's name has all words of one of them",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Resources:
        if self.gpus == 0 and self.least_gpus:
            raise ValueError("gpus: 0 can't be combined with gpu_memory and gpu_types")
        return self

    @property
    def least_gpus(self) -> int:
        """Least number of GPUs; a field about the GPU asks for one."""
        needs_one = self.gpu_memory is not None or self.gpu_types is not None
        return max(self.gpus or 0, int(needs_one))

    def given(self) -> dict[str, str]:
        """Return the fields that are set, as text."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {
            name: " or ".join(value)
            if isinstance(value, list)
            else f"{value:g}"
            if isinstance(value, float)
            else str(value)
            for name, value in values.items()
        }


#: Name of the project in trackers.
PROJECT = "vcasgd"


class TrackerKind(StrEnum):
    """Trackers that jobs can be exported to."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"
    TRACKIO = "trackio"


class Track(StrictModel):
    """A tracker of a job. Its address and credentials are settings of the cluster."""

    to: TrackerKind = Field(description="kind of the tracker")
    project: str = Field(
        default=PROJECT,
        pattern=described(
            r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,99}$",
            "up to 100 letters, digits, points, spaces, dashes, and underscores",
        ),
        description="project of W&B and Trackio, or experiment of MLflow",
    )


def _each_once(tracks: tuple[Track, ...]) -> tuple[Track, ...]:
    kinds = [track.to for track in tracks]
    if twice := [kind for kind in TrackerKind if kinds.count(kind) > 1]:
        raise ValueError(f"{twice[0]} is there twice; a job has one run in each tracker")
    return tracks


Tracks = Annotated[
    tuple[Track, ...], Field(max_length=len(TrackerKind)), AfterValidator(_each_once)
]


class Tuning(StrictModel):
    """Settings that are tuned from measurements.

    All are off by default: with self-tuning, a run depends on the speed of its machines and can't
    be reproduced exactly.
    """

    local_steps: bool = Field(
        default=False,
        strict=True,
        description="give slower workers fewer local steps per push interval, so that all push at "
        "the same rate",
    )
    momentum: bool = Field(
        default=False,
        strict=True,
        description="lower the optimizers' momentum by the momentum that asynchrony adds",
    )
    mixing: bool = Field(
        default=False, strict=True, description="give updates less weight while validation worsens"
    )
    learners_per_machine: int = Field(
        default=1,
        ge=1,
        le=64,
        strict=True,
        description="most learners per machine; each is added only if it raises the throughput",
    )

    @property
    def of_workers(self) -> bool:
        """True if workers use tuned values."""
        return self.local_steps or self.momentum

    @property
    def of_job(self) -> bool:
        """True if the controller tunes values of the job."""
        return self.of_workers or self.mixing
