"""The section ``evaluate`` of a job: how often its model is evaluated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from vcasgd.spec.duration import parse_duration
from vcasgd.spec.strict import StrictModel

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
