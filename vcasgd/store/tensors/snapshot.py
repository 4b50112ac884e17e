"""One snapshot as a value: what it says of itself, its applied record, and a change of it.

How snapshots are read and written is in :mod:`vcasgd.store.tensors.snapshots`.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: of the counts by staleness: they are in every snapshot
MOST_STALENESS = 32


@dataclass(frozen=True)
class Totals:
    """Sums over all updates that are in a snapshot, and over those that were refused."""

    updates: int = 0
    samples: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    loss_sum: float = 0.0
    rejected: dict[str, int] = field(default_factory=dict)
    #: updates by staleness; what is as stale as :data:`MOST_STALENESS` or more is counted there
    staleness: dict[str, int] = field(default_factory=dict)

    @property
    def staleness_mean(self) -> float:
        return self.staleness_sum / self.updates if self.updates else 0.0

    def to_json(self, **more: int | list[int]) -> str:
        return json.dumps({**asdict(self), "staleness_mean": self.staleness_mean, **more})


@dataclass(frozen=True)
class Meta:
    """What a snapshot says of itself.

    ``halves``: whether its chunks are planes of 16 bits (:mod:`vcasgd.store.tensors.bf16_split`),
    and
    ``exact``: whether the low plane is among them.
    ``floats``: length of its float32 vector, of which the first ``parameters`` are parameters
    and the others running statistics. ``layout``: digest of the layout. ``integers``: base64.
    ``rule_state``: whether the update rule remembers something, float32 [floats] in chunks ``r…``.
    """

    version: int
    token: int
    floats: int
    parameters: int
    layout: str
    integers: str = ""
    rule_state: bool = False
    totals: Totals = Totals()
    created_at: float = 0.0
    halves: bool = False
    exact: bool = True

    @property
    def planes(self) -> str:
        return "hl" if self.exact else "h"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Meta:
        return cls(**{**value, "totals": Totals(**value["totals"])})

    @classmethod
    def from_json(cls, text: str | bytes) -> Meta:
        return cls.from_dict(json.loads(text))

    def integer_vector(self) -> Tensor:
        """int64 [integers]: counters that travel beside the float vector."""
        return torch.from_numpy(
            np.frombuffer(base64.b64decode(self.integers), dtype="<i8").astype(np.int64)
        )


@dataclass(frozen=True)
class Record:
    """The applied record as it is stored: finished epochs, and positions in unfinished ones."""

    finished: int = 0
    positions: dict[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "finished": self.finished,
            "positions": {str(key): value for key, value in self.positions.items()},
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Record:
        positions = {int(key): int(at) for key, at in value["positions"].items()}
        return cls(int(value["finished"]), positions)


@dataclass(frozen=True)
class Snapshot:
    """Meta and applied record of one and the same moment."""

    meta: Meta
    record: Record


@dataclass(frozen=True)
class Change:
    """What one commit changes beside the parameters; see ``scripts/tensors/commit.lua``.

    ``base``: the version that is published, which the change was made from.
    """

    base: int
    fields: dict[str, int] = field(default_factory=dict)
    forget: tuple[int, ...] = ()
    entries: tuple[str, ...] = ()
    dealt: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    reset: dict[str, int] = field(default_factory=dict)
    pin: str | None = None
    pinned: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def encode_integers(vector: Tensor) -> str:
    return base64.b64encode(vector.numpy().astype("<i8").tobytes()).decode()


@dataclass(frozen=True)
class SnapshotView:
    """What a parameter server sees in one round trip; ``version`` is None on an empty server.

    ``writer``: token of the server that wrote the version. ``safe``: the version up to which
    everything is on the replicas. ``token``: of whoever may write, 0 where nobody has taken over.
    """

    version: int | None
    writer: int
    safe: int
    token: int
    pins: frozenset[str]
    wanted: tuple[str, ...]


def pin_text(snapshot: Snapshot) -> str:
    return json.dumps({"meta": asdict(snapshot.meta), "record": snapshot.record.to_dict()})


def new_meta(
    old: Meta, token: int, *, version: int, integers: Tensor, exact: bool, rule_state: bool
) -> Meta:
    """The next version's description. ``integers``: int64 [k]."""
    return replace(
        old,
        version=version,
        token=token,
        integers=encode_integers(integers),
        created_at=time.time(),
        exact=exact or not old.halves,
        rule_state=rule_state,
    )


def from_pin(text: bytes) -> Snapshot:
    """What :func:`pin_text` made."""
    value = json.loads(text)
    return Snapshot(Meta.from_dict(value["meta"]), Record.from_dict(value["record"]))


def read_record(applied: Mapping[bytes, bytes]) -> Record:
    """From what :func:`record_fields` made."""
    positions = {
        int(name): int(value)
        for name, value in applied.items()
        if name not in (b"finished", b"version", b"token", b"safe")
    }
    return Record(int(applied.get(b"finished", 0)), positions)


def record_fields(meta: Meta, record: Record, safe: int) -> list[Any]:
    """The applied record as it is stored: field, value, field, value, …"""
    head = {"finished": record.finished, "version": meta.version, "token": meta.token, "safe": safe}
    fields = {**head, **{str(each): at for each, at in record.positions.items()}}
    return [part for pair in fields.items() for part in pair]


def epoch_pin(epoch: int) -> str:
    """Return the name under which the snapshot at the end of an epoch (1, 2, …) is pinned."""
    return f"epoch-{epoch}"
