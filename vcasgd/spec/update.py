"""The section ``update`` of a job: the update rule, the weight of stale updates, the encoding.

Some of its settings are valid, but known to train badly.

:mod:`vcasgd.learning.rules` derives the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from vcasgd.spec.values import StrictModel

if TYPE_CHECKING:
    from vcasgd.spec.job import JobSpec


class Staleness(StrictModel):
    """Weight of an update by its staleness τ (FedAsync, Xie 2019, section 5.2).

    ``constant``: 1. ``polynomial``: (1+τ)^−a. ``hinge``: 1 if τ ≤ b, else 1/(a(τ−b)+1).
    The default of a is that of the paper: 0.5, or 10 for hinge.
    """

    function: Literal["constant", "polynomial", "hinge"] = Field(
        default="constant", description="weight of an update by its staleness"
    )
    a: float = Field(
        default=0.5, gt=0, strict=True, description="steepness; the default is 10 for hinge"
    )
    b: float = Field(
        default=4.0, ge=0, strict=True, description="hinge: full weight up to this staleness"
    )

    @model_validator(mode="before")
    @classmethod
    def _steepness_of_the_hinge(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("function") == "hinge":
            return {"a": 10.0, **value}
        return value


_RULE = "name of the update rule"
_STALENESS = "weight of stale updates"
_CODEC = "encoding of updates"

_WeightsCodec = Literal["float32", "bfloat16"]
_DeltaCodec = Literal["float32", "bfloat16", "int8", "int2", "topk", "partition", "rows"]


class VcAsgdSpec(StrictModel):
    """``W ← αW + (1−α)w`` (Atre 2021); ``alpha: var`` is α = e/(e+1) in epoch e (1, 2, …)."""

    rule: Literal["vc-asgd"] = Field(default="vc-asgd", description=_RULE)
    alpha: Annotated[float, Field(gt=0, lt=1)] | Literal["var"] = Field(
        default="var", description="weight of the model; var is e/(e+1) in epoch e"
    )
    staleness: Staleness = Field(default=Staleness(), description=_STALENESS)
    codec: _WeightsCodec = Field(default="float32", description=_CODEC)

    @field_validator("alpha", mode="before")
    @classmethod
    def _between_zero_and_one(cls, value: object) -> object:
        if value == "var":
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise ValueError(
                f"must be a number between 0 and 1, exclusive, or the word var; not {value!r}"
            )
        return float(value)


class RoundsSpec(StrictModel):
    """``W ← W + Σ nᵢΔᵢ / Σ nᵢ`` over the updates of a round, n in samples (the default).

    Workers train a part of the job's batch each, and wait for each other for a moment after each
    push, so that all train from the same model. ``codec: auto`` is ``float32``, or what the first
    worker's link to the store needs for a large model.
    """

    rule: Literal["rounds"] = Field(default="rounds", description=_RULE)
    codec: Literal["auto", "float32", "bfloat16", "int8", "int2", "topk", "rows"] = Field(
        default="auto", description=_CODEC
    )


class SmaSpec(StrictModel):
    """``v ← μv + α·s(τ)·(w − W)``, ``W ← W + v`` (CROSSBOW, Koliousis 2019).

    The worker's own copy moves by α towards W. ``moving_rate`` is α, in the paper about 1 divided
    by the number of workers; ``momentum`` is μ. With μ = 0 this is EASGD (Zhang 2015).
    """

    rule: Literal["sma"] = Field(description=_RULE)
    moving_rate: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        strict=True,
        description="weight of an update, and how far a worker is pulled toward the model",
    )
    momentum: float = Field(
        default=0.5, ge=0, lt=1, strict=True, description="momentum of the model"
    )
    staleness: Staleness = Field(default=Staleness(), description=_STALENESS)
    codec: _WeightsCodec = Field(default="float32", description=_CODEC)


class AsyncLocalSgdSpec(StrictModel):
    """``W ← W + η·s(τ)·Δ`` (Liu 2024).

    ``eta`` is η. Running statistics are averaged with weight ``statistics_mix``, not summed. With
    ``codec: partition`` each update carries one of ``partitions`` parts.
    """

    rule: Literal["async-local-sgd"] = Field(description=_RULE)
    eta: float = Field(default=1.0, gt=0, le=10, strict=True, description="weight of a difference")
    statistics_mix: float = Field(
        default=0.5, gt=0, le=1, strict=True, description="weight of running statistics"
    )
    staleness: Staleness = Field(default=Staleness(), description=_STALENESS)
    codec: _DeltaCodec = Field(default="float32", description=_CODEC)
    partitions: int = Field(
        default=4, ge=2, le=64, strict=True, description="parts of codec partition"
    )


_AnyRule = RoundsSpec | VcAsgdSpec | SmaSpec | AsyncLocalSgdSpec
Update = Annotated[_AnyRule, Field(discriminator="rule")]

#: The model of the section ``update`` for each name of a rule.
RULES: dict[str | int, type[StrictModel]] = {
    get_args(part.model_fields["rule"].annotation)[0]: part for part in get_args(_AnyRule)
}


# -- settings that train badly ------------------------------------------------------------------

#: Largest final loss of each rule with its defaults, as a multiple of that of one process: with one
#: worker, and with eight. Measured by ``benchmarks/learning/stability.py`` on short jobs.
LOSSES: dict[str, tuple[float, float]] = {
    "rounds": (1.00, 1.09),
    "vc-asgd": (1.69, 2.83),
    "sma": (1.14, 2.35),
    "async-local-sgd": (1.12, 18.15),
}
#: Ratio of the losses above which settings count as unstable.
LIMIT = 1.1
#: Local steps from which on encodings have larger ratios under the default rule, with
#: ``COARSE_WORKERS`` or more.
COARSE_STEPS = {"int2": 64, "topk": 16}
COARSE_WORKERS = 8


@dataclass(frozen=True)
class SettingWarning:
    """A setting that may disappoint its user. ``field`` is its path in the job file."""

    field: str
    message: str
    remedy: str


def unstable_settings(spec: JobSpec) -> list[SettingWarning]:
    """Return a warning for each setting that the stability benchmark found to end badly."""
    one, eight = LOSSES[spec.update.rule]
    loss = one if spec.workers.max == 1 else eight
    if loss > LIMIT:
        workers = "one worker" if spec.workers.max == 1 else "eight workers"
        message = (
            f"short jobs with {spec.update.rule} and {workers} ended with up to {loss:.1f} times "
            "the loss of one process"
        )
        remedy = "leave it out to train as on one machine; docs/learning.md has the measurements"
        return [SettingWarning("update.rule", message, remedy)]
    steps, codec = spec.push_every, spec.update.codec
    long = isinstance(steps, int) and steps >= COARSE_STEPS.get(codec, math.inf)
    if long and spec.workers.max >= COARSE_WORKERS:
        message = f"a loss more than {LIMIT:g} times that of one process was measured with {codec}"
        return [SettingWarning("push_every", message, "shorten it, or use int8")]
    return []
