"""The section ``stop`` of a job: what ends or pauses it early, and the metric that ranks models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from vcasgd.spec.duration import Duration
from vcasgd.spec.strict import StrictModel


class Metric(StrictModel):
    """A validation metric that ranks a job's models, and optionally the value that ends the job.

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


#: Metrics that rank the models of a job whose specification names none, in order of preference.
DEFAULT_METRICS = (Metric(name="accuracy", mode="max"), Metric(name="loss", mode="min"))


class Stop(StrictModel):
    """Conditions that end the job early, or pause it.

    ``metric`` names the validation metric that ranks the evaluated models; the job ends when one
    reaches its target. ``accuracy: 0.91`` is short for
    ``metric: {name: accuracy, mode: max, target: 0.91}``. After ``patience`` evaluations in a row
    without a better value, the job ends with its best model. The job is paused before its machines
    cost ``max_cost_usd``.
    """

    accuracy: float | None = Field(default=None, gt=0, le=1, strict=True)
    metric: Metric | None = None
    patience: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        strict=True,
        description="evaluations in a row without a better value of the metric, which end the job",
    )
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
