"""The part ``update`` of a job: which rule blends updates, how stale ones are weighted, and how
they are encoded. :mod:`vcasgd.learning.rules` derives the formulas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from vcasgd.spec.strict import StrictModel


class Staleness(StrictModel):
    """How an update loses weight with its staleness τ (FedAsync, Xie 2019, section 5.2).

    ``constant``: 1. ``polynomial``: (1+τ)^−a. ``hinge``: 1 if τ ≤ b, else 1/(a(τ−b)+1).
    Unless given, a is 0.5, for hinge 10, as in the paper.
    """

    function: Literal["constant", "polynomial", "hinge"] = "constant"
    a: float = Field(default=0.5, gt=0, strict=True, description="steepness; 10 for hinge")
    b: float = Field(default=4.0, ge=0, strict=True, description="hinge: nothing is lost up to b")

    @model_validator(mode="before")
    @classmethod
    def _steepness_of_the_hinge(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("function") == "hinge":
            return {"a": 10.0, **value}
        return value


POLYNOMIAL = Staleness(function="polynomial")

_WeightsCodec = Literal["float32", "bfloat16"]
_DeltaCodec = Literal["float32", "bfloat16", "int8", "topk", "partition", "rows"]
_Buffer = Annotated[int, Field(ge=1, le=100_000, strict=True)]


class VcAsgdSpec(StrictModel):
    """``W ← αW + (1−α)w`` (Atre 2021); ``alpha: var`` is α = e/(e+1) in epoch e = 1, 2, …"""

    rule: Literal["vc-asgd"] = "vc-asgd"
    alpha: Annotated[float, Field(gt=0, lt=1)] | Literal["var"] = "var"
    staleness: Staleness = Staleness()
    codec: _WeightsCodec = "float32"

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


class FedAsyncSpec(StrictModel):
    """``W ← (1−β·s(τ))W + β·s(τ)·w`` (Xie 2019)."""

    rule: Literal["fedasync"]
    beta: float = Field(default=0.6, gt=0, lt=1, strict=True)
    staleness: Staleness = POLYNOMIAL
    codec: _WeightsCodec = "float32"


class EasgdSpec(StrictModel):
    """``W ← W + α·s(τ)·(w − W)``, and the worker's copy, which it keeps, moves by α towards W
    (Zhang 2015). ``moving_rate`` is α; the paper's is 0.9 divided by the number of workers."""

    rule: Literal["easgd"]
    moving_rate: float = Field(default=0.225, gt=0, lt=1, strict=True)
    staleness: Staleness = Staleness()
    codec: _WeightsCodec = "float32"


class SmaSpec(StrictModel):
    """As ``easgd``, and the central average has momentum (CROSSBOW, Koliousis 2019):
    ``v ← μv + α·s(τ)·(w − W)``, ``W ← W + v``. ``moving_rate`` is α, near 1 divided by the
    number of workers in the paper; ``momentum`` is μ."""

    rule: Literal["sma"]
    moving_rate: float = Field(default=0.25, gt=0, lt=1, strict=True)
    momentum: float = Field(default=0.5, ge=0, lt=1, strict=True)
    staleness: Staleness = Staleness()
    codec: _WeightsCodec = "float32"


class _Differences(StrictModel):
    """What rules have in common that add differences: ``eta`` is η; running statistics are
    averaged with weight ``statistics_mix``, never summed. Under ``codec: partition`` each update
    carries one of so many ``partitions``."""

    eta: float = Field(default=1.0, gt=0, le=10, strict=True)
    statistics_mix: float = Field(default=0.5, gt=0, le=1, strict=True)
    codec: _DeltaCodec = "float32"
    partitions: int = Field(default=4, ge=2, le=64, strict=True, description="of codec partition")


class AsyncLocalSgdSpec(_Differences):
    """``W ← W + η·s(τ)·Δ`` (Liu 2024); running statistics are averaged with weight
    ``statistics_mix``, never summed."""

    rule: Literal["async-local-sgd"]
    staleness: Staleness = Staleness()


class DownpourSpec(_Differences):
    """``W ← W + η·Δ/max(τ, 1)``: Downpour SGD with a staleness-aware rate (Zhang 2016)."""

    rule: Literal["downpour"]


class DelayedNesterovSpec(_Differences):
    """``W ← W + η·s(τ)·Δ/N``, and with each N-th update a step of momentum (Liu 2024).
    ``buffer`` is N, ``momentum`` β."""

    rule: Literal["delayed-nesterov"]
    buffer: _Buffer = 4
    momentum: float = Field(default=0.9, ge=0, lt=1, strict=True)
    staleness: Staleness = Staleness()


class FedBuffSpec(_Differences):
    """``W ← W + (η/K)·Σ s(τᵢ)Δᵢ`` with each K-th update, and at the end of each epoch
    (Nguyen 2022). ``buffer`` is K."""

    rule: Literal["fedbuff"]
    buffer: _Buffer = 10
    staleness: Staleness = POLYNOMIAL


class DcAsgdSpec(_Differences):
    """``W ← W + η·s(τ)·(Δ − λ·Δ⊙Δ⊙(W − w₀))`` (Zheng 2017). ``compensation`` is λ: the paper's
    divided by the local learning rate and by the local steps of a push. ``history``: how many
    published versions the parameter server remembers; updates of older ones are not compensated.
    """

    rule: Literal["dc-asgd"]
    compensation: float = Field(gt=0, le=1e6, strict=True)
    history: int = Field(default=8, ge=1, le=1000, strict=True)
    staleness: Staleness = Staleness()


_AnyRule = (
    VcAsgdSpec
    | FedAsyncSpec
    | EasgdSpec
    | SmaSpec
    | AsyncLocalSgdSpec
    | DownpourSpec
    | DelayedNesterovSpec
    | FedBuffSpec
    | DcAsgdSpec
)
Update = Annotated[_AnyRule, Field(discriminator="rule")]

#: the part that belongs to the name of a rule
RULES: dict[str | int, type[StrictModel]] = {
    get_args(part.model_fields["rule"].annotation)[0]: part for part in get_args(_AnyRule)
}
