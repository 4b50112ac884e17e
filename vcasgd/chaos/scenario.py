"""Scenario file: the faults of a chaos run, when they happen, and what they may cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from vcasgd.chaos.network import Direction
from vcasgd.errors import SpecError
from vcasgd.spec.duration import Duration
from vcasgd.spec.problems import spec_error
from vcasgd.spec.strict import StrictModel
from vcasgd.spec.yaml import load_mapping

#: Kind of a fault. ``freeze`` is SIGSTOP, and SIGCONT in the end; ``kill`` is SIGKILL;
#: ``slow-fsync`` delays each fsync of the process; ``drop`` loses packets in one direction between
#: one machine and the server.
FaultKind = Literal["freeze", "kill", "slow-fsync", "drop"]
#: Kind of a part of the stack, or a random machine that trains, which can only be killed.
Place = Literal["ledger", "tensors", "server", "controller", "api", "head", "worker"]


class FaultSpec(StrictModel):
    """A fault, or several with equal pauses between their beginnings.

    Times count from the moment at which all machines train.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    what: FaultKind
    where: Place
    when: Duration = Field(description="time of the first fault")
    every: Duration | None = Field(default=None, description="time between two faults")
    times: int = Field(default=1, ge=1, le=1000, strict=True, description="number of faults")
    length: Duration | None = Field(default=None, alias="for", description="duration of a fault")
    delay: Duration | None = Field(default=None, description="duration of an fsync")
    direction: Direction | None = Field(default=None, description="direction of lost packets")
    longest_pause: Duration | None = Field(
        default=None, description="expected longest time without progress, instead of the total's"
    )

    @model_validator(mode="after")
    def _complete(self) -> FaultSpec:
        needed = {
            "every": self.times > 1,
            "for": self.what != "kill",
            "delay": self.what == "slow-fsync",
            "direction": self.what == "drop",
        }
        given = {
            "every": self.every,
            "for": self.length,
            "delay": self.delay,
            "direction": self.direction,
        }
        for name, is_needed in needed.items():
            if is_needed and given[name] is None:
                reason = "times" if name == "every" else f"what: {self.what}"
                raise ValueError(f"{name} is required with {reason}")
            if not is_needed and given[name] is not None:
                raise ValueError(f"{name} has no effect here; remove it")
        if self.every and self.length and self.every <= self.length:
            raise ValueError("every must be longer than for")
        if self.what == "slow-fsync" and self.where != "ledger":
            raise ValueError("slow-fsync needs where: ledger, the only part that syncs a file")
        if self.what == "drop" and self.where not in ("ledger", "tensors"):
            raise ValueError("drop needs where: ledger or tensors, the servers of a worker")
        if self.what == "freeze" and self.where == "worker":
            raise ValueError("a machine can't be frozen, because it is then replaced; use kill")
        return self


class Expectations(StrictModel):
    """Most that the faults may cost, by the audit's count."""

    lost_samples: int = Field(default=0, ge=0, strict=True)
    repeated_samples: int = Field(default=0, ge=0, strict=True)
    lost_machines: int = Field(default=0, ge=0, strict=True)
    longest_pause: Duration = Field(
        description="longest time without progress, from a fault to the next one"
    )


class Scenario(StrictModel):
    """A chaos run on a stack of its own."""

    faults: tuple[FaultSpec, ...] = Field(min_length=1)
    expect: Expectations

    @classmethod
    def load(cls, path: Path) -> Scenario:
        """Load a YAML file. Raises :class:`SpecError`, which names the first invalid field."""
        value = load_mapping(path, "a scenario", remedy="write at least faults and expect")
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = spec_error(error, cls)
            raise SpecError(
                f"{path}: {first.message}", remedy=first.remedy, **first.details
            ) from error


@dataclass(frozen=True)
class Injection:
    """One fault of a schedule; times in seconds."""

    at: float
    what: FaultKind
    where: Place
    seconds: float
    delay: float
    direction: Direction | None
    longest_pause: float

    def __str__(self) -> str:
        direction = f" {self.direction}" if self.direction else ""
        lasting = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.what} {self.where}{direction}{lasting}"

    @property
    def end(self) -> float:
        return self.at + self.seconds


def schedule(scenario: Scenario) -> list[Injection]:
    """Return all faults of a scenario in order."""
    return sorted(
        (
            Injection(
                at=(fault.when + (fault.every or timedelta()) * number).total_seconds(),
                what=fault.what,
                where=fault.where,
                seconds=_seconds(fault.length),
                delay=_seconds(fault.delay),
                direction=fault.direction,
                longest_pause=_seconds(fault.longest_pause or scenario.expect.longest_pause),
            )
            for fault in scenario.faults
            for number in range(fault.times)
        ),
        key=lambda injection: injection.at,
    )


def _seconds(duration: timedelta | None) -> float:
    return duration.total_seconds() if duration else 0.0


def longest_gap(moments: Sequence[float], since: float, until: float) -> float:
    """Return the longest time between two successive moments, cut to ``[since, until]``.

    ``moments`` are ascending. The limits count as moments.
    """
    inside = [since, *(each for each in moments if since < each < until), until]
    return max(later - earlier for earlier, later in pairwise(inside))


def shortfalls(
    expect: Expectations,
    *,
    lost_samples: int,
    repeated_samples: int,
    lost_machines: int,
    pauses: Iterable[tuple[Injection, float]],
) -> list[str]:
    """Return in which respects the faults cost more than expected."""
    counts = {
        "lost samples": (lost_samples, expect.lost_samples),
        "repeated samples": (repeated_samples, expect.repeated_samples),
        "lost machines": (lost_machines, expect.lost_machines),
    }
    return [
        *(f"{count} {what}, expected at most {most}" for what, (count, most) in counts.items()
          if count > most),
        *(f"{injection}: {pause:.1f} s without progress, expected at most "
          f"{injection.longest_pause:g} s" for injection, pause in pauses
          if pause > injection.longest_pause),
    ]  # fmt: skip
