"""Value types of snapshots: description, applied record, and changes.

:mod:`vcasgd.store.tensors.snapshot_store` reads and writes snapshots.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Base64UrlBytes, Field, TypeAdapter, ValidationError

from vcasgd.errors import JobUnreadable
from vcasgd.learning.applied_record import AppliedRecord
from vcasgd.learning.subtasks import EpochPlan
from vcasgd.limits import MAX_LOGGED
from vcasgd.spec.problems import first_mistake
from vcasgd.store.tensors.header import Logged, LoggedName
from vcasgd.task.logged import LARGEST

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

#: Steps that a description lists at most.
MAX_STEPS = 32

_Number = Annotated[int, Field(ge=0, lt=2**53)]
#: Count in a snapshot. A worker makes the first one, so it may be anything; sums stay exact.
_Count = Annotated[int, Field(ge=0, lt=2**52)]
_Amount = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
_FiniteSum = Annotated[float, Field(allow_inf_nan=False)]
_Reason = Annotated[str, Field(max_length=64)]
_LoggedSums = Annotated[dict[LoggedName, tuple[_FiniteSum, _Count]], Field(max_length=MAX_LOGGED)]
_Staleness = Annotated[str, Field(pattern=r"^[0-9]{1,3}$")]


@dataclass(frozen=True)
class UpdateTotals:
    """Sums over all updates in a snapshot, and counts of rejected updates by reason."""

    updates: _Count = 0
    samples: _Count = 0
    staleness_sum: _Count = 0
    staleness_max: _Count = 0
    loss_sum: float = 0.0
    rejected: dict[_Reason, _Count] = field(default_factory=dict)
    #: Updates by staleness; the last count, ``MAX_STALENESS``, includes larger ones.
    staleness: dict[_Staleness, _Count] = field(default_factory=dict)
    #: Samples that weren't trained because they are bad.
    skipped: _Count = 0
    #: Sums and numbers of the values that steps logged, by name.
    logged: _LoggedSums = field(default_factory=dict)

    def with_logged(self, values: Iterable[Logged]) -> _LoggedSums:
        """Return the sums with those of an update. Of too many names, later ones are left out."""
        sums = dict(self.logged)
        for name, total, count in values:
            before, number = sums.get(name, (0.0, 0))
            if name in sums or len(sums) < MAX_LOGGED:
                # Beyond the limit, a sum stands still instead of becoming infinite.
                sums[name] = max(-LARGEST, min(LARGEST, before + total)), number + count
        return sums

    def logged_since(self, before: UpdateTotals) -> dict[str, float]:
        """Return the means of the values that were logged after earlier totals, by name."""
        means = {}
        for name, (total, count) in self.logged.items():
            earlier, number = before.logged.get(name, (0.0, 0))
            if count > number:
                means[name] = (total - earlier) / (count - number)
        return means

    @property
    def staleness_mean(self) -> float:
        """Mean staleness, 0 without updates."""
        return self.staleness_sum / self.updates if self.updates else 0.0

    def to_json(self, **more: int | list[int]) -> str:
        """Return the totals, their mean staleness, and ``more`` as JSON."""
        return json.dumps({**asdict(self), "staleness_mean": self.staleness_mean, **more})


@dataclass(frozen=True)
class PublishedStep:
    """A step of ``size`` bytes from a version, which the server with ``token`` wrote, to the
    next one in the list. The field names are part of the stored format."""

    version: _Number
    token: _Number
    size: _Number


@dataclass(frozen=True)
class RoundFacts:
    """The round that made a version: the number of its workers, the sum of their local batches in
    samples, the duration of a step in which each has the part that its speed allows, and the least
    time between two intervals of one of them, both in seconds; and the samples that the version
    contains. All are 0 before the first round."""

    workers: _Count = 0
    batch: _Amount = 0.0
    step_seconds: _Amount = 0.0
    exchange_seconds: _Amount = 0.0
    samples: _Count = 0


@dataclass(frozen=True)
class Meta:
    """Description of a snapshot.

    ``floats`` is the length of its float32 vector, of which the first ``parameters`` elements are
    parameters and the others running statistics. ``layout`` is the digest of the layout, and
    ``integers`` base64 of int64 counters. ``rule_state`` is True if the update rule has a state,
    or the model an average, float32 [floats] in chunks ``r…``. ``halves`` is True if the vector is
    split into high and low halves (:mod:`vcasgd.store.tensors.chunks`), and ``exact`` if the low
    halves are stored.
    ``rollbacks`` is the number of times that training went back to an earlier model.
    ``restorations`` counts those after which the applied record went back, too, because an owner's
    work was wrong. ``stepped`` is True if workers train from another vector than the exact one,
    float32 [floats] in chunks ``p…`` with this ``checksum``, to which ``steps`` lead from earlier
    versions (:mod:`vcasgd.learning.encodings.steps`).

    The field names are part of the stored format.
    """

    version: _Count
    token: Annotated[int, Field(ge=0, lt=2**53)]
    floats: Annotated[int, Field(ge=0, lt=2**40)]
    parameters: Annotated[int, Field(ge=0, lt=2**40)]
    layout: Annotated[str, Field(max_length=64)]
    integers: str = ""
    rule_state: bool = False
    totals: UpdateTotals = UpdateTotals()
    created_at: float = 0.0
    halves: bool = False
    exact: bool = True
    rollbacks: _Count = 0
    restorations: _Count = 0
    round: RoundFacts = RoundFacts()
    stepped: bool = False
    checksum: Annotated[int, Field(ge=0, lt=2**53)] = 0
    steps: Annotated[tuple[PublishedStep, ...], Field(max_length=MAX_STEPS)] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Meta:
        """Parse the description of a snapshot, which a worker may have written.

        Raises :class:`~vcasgd.errors.JobUnreadable`.
        """
        try:
            meta = _META.validate_json(text, strict=True)
            meta._counters()
        except ValidationError as error:
            raise _unreadable(first_mistake(error)) from error
        except ValueError as error:
            raise _unreadable("integers: not base64 of 64-bit integers") from error
        return meta

    def integer_vector(self) -> Tensor:
        """Return the counters beside the float vector, int64 [integers]."""
        from torch import from_numpy  # A caller that needs tensors has imported torch.

        return from_numpy(self._counters())

    def _counters(self) -> NDArray[np.int64]:
        return np.frombuffer(base64.b64decode(self.integers), dtype="<i8").astype(np.int64)


_META = TypeAdapter(Meta)


def _unreadable(why: str) -> JobUnreadable:
    return JobUnreadable(f"the stored snapshot can't be read: {why[:300]}")


@dataclass(frozen=True)
class Record:
    """Stored form of the applied record: finished epochs, positions in unfinished ones, and
    subtasks that are done, as blocks of a :class:`~vcasgd.learning.applied_record.SubtaskSet`."""

    finished: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    done: dict[int, Base64UrlBytes] = field(default_factory=dict)

    def applied(self, plan: EpochPlan) -> AppliedRecord:
        """Return the applied record of a job with this plan.

        Raises :class:`~vcasgd.errors.CheckpointDamaged` if it is not one of this plan.
        """
        return AppliedRecord(plan, self.finished, self.positions, self.done)


@dataclass(frozen=True)
class Snapshot:
    """Description and applied record of the same version."""

    meta: Meta
    record: Record

    def to_dict(self) -> dict[str, Any]:
        return {"meta": asdict(self.meta), "record": _RECORD.dump_python(self.record, mode="json")}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Snapshot:
        """Return the snapshot of these JSON values. Raises :class:`ValueError`."""
        snapshot = _SNAPSHOT.validate_python(value)
        # A part of the record that is missing would count as not applied.
        if value["record"].keys() != asdict(snapshot.record).keys():
            raise ValueError("the applied record is incomplete")
        return snapshot


_RECORD, _SNAPSHOT = TypeAdapter(Record), TypeAdapter(Snapshot)


@dataclass(frozen=True)
class Change:
    """Changes that one commit makes besides the parameters; see ``scripts/tensors/commit.lua``.

    ``base`` is the published version that the change was made from. The field names are those of
    the script.
    """

    base: int
    fields: dict[str, int] = field(default_factory=dict)
    done: tuple[int, ...] = ()
    forget: tuple[int, int] = (0, 0)
    entries: tuple[str, ...] = ()
    processed: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    reset: dict[str, int] = field(default_factory=dict)
    pin: str | None = None
    pinned: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def encode_integers(vector: Tensor) -> str:
    """Encode int64 [k] as in :attr:`Meta.integers`."""
    return base64.b64encode(vector.numpy().astype("<i8").tobytes()).decode()


@dataclass(frozen=True)
class SnapshotView:
    """State of a shard on the tensors server, read in one round trip.

    ``version`` is None if there is no snapshot. ``writer`` is the token of the parameter server
    that wrote the version, and ``token`` that of the one that may write now, 0 if none has taken
    over. Up to the version ``safe``, everything is on the replicas.
    """

    version: int | None
    writer: int
    safe: int
    token: int
    pins: frozenset[str]
    pin_requests: tuple[str, ...]


def pin_text(snapshot: Snapshot) -> str:
    """Return the stored form of a pinned snapshot."""
    # Steps are deleted as soon as newer versions no longer list them.
    return json.dumps(replace(snapshot, meta=replace(snapshot.meta, steps=())).to_dict())


def from_pin(text: bytes) -> Snapshot:
    """Parse the text of :func:`pin_text`."""
    return Snapshot.from_dict(json.loads(text))


def read_record(applied: Mapping[bytes, bytes]) -> Record:
    """Parse the hash that :func:`record_fields` filled, or a worker.

    Raises :class:`~vcasgd.errors.JobUnreadable`.
    """
    positions, done = {}, {}
    for name, value in applied.items():
        if name.startswith(b"b"):
            done[stored_count(name[1:])] = value
        elif name not in (b"finished", b"version", b"token", b"safe"):
            positions[stored_count(name)] = stored_count(value)
    return Record(stored_count(applied.get(b"finished", b"0")), positions, done)


def stored_count(text: bytes) -> int:
    """Parse a count of an applied record. Raises :class:`~vcasgd.errors.JobUnreadable`."""
    if not (text.isdigit() and len(text) <= 16):
        raise _unreadable(f"applied record: {text[:20]!r} is not a count")
    return int(text)


def record_fields(meta: Meta, record: Record, safe: int) -> list[Any]:
    """Return the stored form of the applied record: field, value, field, value, and so on."""
    head = {"finished": record.finished, "version": meta.version, "token": meta.token, "safe": safe}
    positions = {str(subtask): at for subtask, at in record.positions.items()}
    done = {f"b{block}": bits for block, bits in record.done.items()}
    return [part for pair in {**head, **positions, **done}.items() for part in pair]
