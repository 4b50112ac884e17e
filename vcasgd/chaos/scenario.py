"""Scenario file: faults, when they happen, and what they may cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from vcasgd.errors import SpecError
from vcasgd.fleet.histories import read_counts
from vcasgd.spec.problems import spec_error
from vcasgd.spec.values import Duration, StrictModel
from vcasgd.spec.yaml import load_mapping

#: Kind of a fault. ``freeze`` is SIGSTOP, and SIGCONT in the end; ``kill`` is SIGKILL; ``evict``
#: takes a machine with notice; ``slow-fsync`` delays each fsync of the process; ``drop`` loses
#: packets between one machine and the server; ``capacity`` takes machines and refuses new ones;
#: ``full-disk`` leaves no space for checkpoints; ``step-clock`` sets a wall clock, and sets it
#: right in the end.
FaultKind = Literal[
    "freeze", "kill", "evict", "slow-fsync", "drop", "capacity", "full-disk", "step-clock"
]
#: Kind of a part of the stack, or a random machine that trains, the pool of machines, or the folder
#: of checkpoints.
Place = Literal[
    "ledger", "tensors", "server", "controller", "api", "head", "worker", "pool", "storage"
]
OneWay = Literal["to-server", "to-worker"]
#: Direction in which packets are lost, seen from the machine.
Direction = Literal[OneWay, "both"]
_PARTS: frozenset[Place] = frozenset(get_args(Place)[:6])
#: Places that each kind of fault can hit.
_PLACES: dict[FaultKind, frozenset[Place]] = {
    "freeze": _PARTS,
    "kill": _PARTS | {"worker"},
    "evict": frozenset({"worker"}),
    "slow-fsync": frozenset({"ledger"}),  # the only part that syncs a file
    "drop": frozenset({"ledger", "tensors"}),  # the servers of a worker
    "capacity": frozenset({"pool"}),
    "full-disk": frozenset({"storage"}),
    "step-clock": _PARTS | {"worker"},
}
#: Fields that a kind of fault needs, and no other kind has.
_OWN_FIELDS: dict[FaultKind, tuple[str, ...]] = {
    "evict": ("notice",),
    "slow-fsync": ("delay",),
    "drop": ("direction",),
}
#: Pairs of fields of which a kind of fault needs either, and no other kind has one.
_EITHER: dict[FaultKind, tuple[str, str]] = {
    "capacity": ("machines", "trace"),
    "step-clock": ("ahead", "behind"),
}


class FaultSpec(StrictModel):
    """A fault, or several with equal pauses between their beginnings.

    Times count from the moment at which all machines train.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    what: FaultKind = Field(description="kind of fault")
    where: Place = Field(
        description="a part of the stack, a random machine that trains (worker), pool, or storage"
    )
    when: Duration = Field(description="time of the first fault")
    every: Duration | None = Field(default=None, description="time between two faults")
    times: int = Field(default=1, ge=1, le=1000, strict=True, description="number of faults")
    length: Duration | None = Field(default=None, alias="for", description="duration of a fault")
    delay: Duration | None = Field(default=None, description="duration of an fsync")
    direction: Direction | None = Field(default=None, description="direction of lost packets")
    notice: Duration | None = Field(default=None, description="time from the notice to the end")
    machines: int | None = Field(
        default=None, ge=0, strict=True, description="machines that the pool can have"
    )
    trace: Path | None = Field(
        default=None, description="recorded history of a pool, relative to the scenario's file"
    )
    skip: Duration | None = Field(default=None, description="time of the trace to skip")
    faster: float | None = Field(default=None, gt=0, description="speed-up factor for the trace")
    ahead: Duration | None = Field(default=None, description="step of a clock into the future")
    behind: Duration | None = Field(default=None, description="step of a clock into the past")
    max_pause: Duration | None = Field(
        default=None, description="expected longest time without progress, instead of the total's"
    )

    @model_validator(mode="after")
    def _complete(self) -> FaultSpec:
        needed = {"every": self.times > 1, "for": self.what not in ("kill", "evict")}
        needed |= {name: self.what == kind for kind, names in _OWN_FIELDS.items() for name in names}
        given = {**vars(self), "for": self.length}
        for name, is_needed in needed.items():
            if is_needed and given[name] is None:
                reason = "times" if name == "every" else f"what: {self.what}"
                raise ValueError(f"{name} is required with {reason}")
            if not is_needed and given[name] is not None:
                raise ValueError(f"{name} has no effect here; remove it")
        if self.every and self.length and self.every <= self.length:
            raise ValueError("every must be longer than for")
        if self.where not in _PLACES[self.what]:
            places = ", ".join(place for place in get_args(Place) if place in _PLACES[self.what])
            raise ValueError(f"{self.what} needs where: {places}")
        self._check_choices()
        return self

    def _check_choices(self) -> None:
        for kind, names in _EITHER.items():
            has = [name for name in names if getattr(self, name) is not None]
            if self.what == kind and len(has) != 1:
                raise ValueError(f"{kind} needs either {' or '.join(names)}")
            if self.what != kind and has:
                raise ValueError(f"{has[0]} has no effect here; remove it")
        for name in ("skip", "faster") if self.trace is None else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect without a trace; remove it")

    def counts(self, folder: Path, most: int) -> Counts | None:
        """Return how many machines the pool has, for a fault of its capacity.

        The trace is relative to ``folder``, and gives at most ``most`` machines. Raises
        :class:`SpecError` for an invalid trace.
        """
        if self.length is None or (self.machines is None and self.trace is None):
            return None
        if self.machines is not None:
            return Counts((self.machines,), self.length.total_seconds())
        assert self.trace is not None
        counts, gap = read_counts(folder / self.trace, most)
        first = int((self.skip or timedelta()).total_seconds() / gap)
        gap /= self.faster or 1.0
        last = first + max(1, round(self.length.total_seconds() / gap))
        if last > len(counts):
            raise SpecError(f"trace: {self.trace} ends before the fault does", field="trace")
        return Counts(tuple(counts[first:last]), gap)


@dataclass(frozen=True)
class Counts:
    """Machines that a pool can have, each number for so many seconds."""

    machines: tuple[int, ...]
    seconds: float


class Expectations(StrictModel):
    """Most that the faults may cost, by the audit's count."""

    lost_samples: int = Field(default=0, ge=0, strict=True)
    repeated_samples: int = Field(default=0, ge=0, strict=True)
    lost_machines: int = Field(default=0, ge=0, strict=True)
    max_pause: Duration = Field(
        description="longest time without progress, from a fault to the next one"
    )


class Scenario(StrictModel):
    """Faults on a stack of their own, and what they may cost."""

    faults: tuple[FaultSpec, ...] = Field(min_length=1)
    expect: Expectations
    _folder: Path = PrivateAttr(default=Path())

    @classmethod
    def load(cls, path: Path) -> Scenario:
        """Load a YAML file. Raises :class:`SpecError`, which names the first invalid field."""
        value = load_mapping(path, "a scenario", remedy="write at least faults and expect")
        try:
            scenario = cls.model_validate(value)
        except ValidationError as error:
            first = spec_error(error, cls)
            raise SpecError(
                f"{path}: {first.message}", remedy=first.remedy, **first.details
            ) from error
        scenario._folder = path.parent
        return scenario

    @property
    def folder(self) -> Path:
        """The folder of the file, to which paths in it are relative."""
        return self._folder


@dataclass(frozen=True)
class Injection:
    """One fault of a schedule; times in seconds."""

    at: float
    what: FaultKind
    where: Place
    seconds: float
    delay: float
    direction: Direction | None
    max_pause: float
    notice: float = 0.0
    counts: Counts | None = None
    #: Seconds by which a clock is set ahead.
    step: float = 0.0

    def __str__(self) -> str:
        direction = f" {self.direction}" if self.direction else ""
        noticed = f" {self.notice:g} s after a notice" if self.notice else ""
        stepped = f" by {self.step:+g} s" if self.step else ""
        lasting = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.what} {self.where}{direction}{noticed}{stepped}{lasting}"

    @property
    def end(self) -> float:
        return self.at + self.seconds


def schedule(scenario: Scenario, machines: int) -> list[Injection]:
    """Return all faults of a scenario in order. The pool has at most so many machines.

    Raises :class:`SpecError` for an invalid trace.
    """
    return sorted(
        (
            Injection(
                at=(fault.when + (fault.every or timedelta()) * number).total_seconds(),
                what=fault.what,
                where=fault.where,
                seconds=_seconds(fault.length),
                delay=_seconds(fault.delay),
                direction=fault.direction,
                max_pause=_seconds(fault.max_pause or scenario.expect.max_pause),
                notice=_seconds(fault.notice),
                counts=fault.counts(scenario.folder, machines),
                step=_seconds(fault.ahead) - _seconds(fault.behind),
            )
            for fault in scenario.faults
            for number in range(fault.times)
        ),
        key=lambda injection: injection.at,
    )


def _seconds(duration: timedelta | None) -> float:
    return duration.total_seconds() if duration else 0.0


def max_gap(moments: Sequence[float], since: float, until: float) -> float:
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
          f"{injection.max_pause:g} s" for injection, pause in pauses
          if pause > injection.max_pause),
    ]  # fmt: skip
