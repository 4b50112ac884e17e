"""Header of an update: what a worker claims about it, parsed strictly."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vcasgd.errors import InvalidUpdate
from vcasgd.limits import MAX_HEADER_BYTES, MAX_INTEGERS_BYTES, MAX_LOGGED
from vcasgd.spec.problems import first_mistake
from vcasgd.store.keys import TensorKeys
from vcasgd.task.logged import LARGEST, NAME_PATTERN

#: Reason of the rejection of a header without a valid signature of its worker.
UNSIGNED = "signature"

_Count = Annotated[int, Field(ge=0, lt=2**53)]
LoggedName = Annotated[str, Field(pattern=NAME_PATTERN)]
LoggedSum = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
#: Name, sum, and number of values.
Logged = tuple[LoggedName, LoggedSum, Annotated[int, Field(ge=1, le=10**9)]]


class Header(BaseModel):
    """Description of an update for one shard.

    ``start`` and ``stop`` are samples of the subtask, ``skipped`` of which weren't trained because
    they are bad, and ``base`` is the version of this shard
    that the update was trained from; ``rollbacks`` is the lowest :attr:`Meta.rollbacks` of all
    shards' parts of that model. ``size`` and ``checksum``, the 64-bit XXH3, describe the encoded
    part of the vector that belongs to the shard. ``weight`` is that of its batches in samples. A
    checksum detects accidents, not malice; a missing one is computed while the payload is sent.
    ``integers`` is base64 of int64, or empty if unchanged since the base. ``logged`` has what the
    interval's steps logged: names with sums and numbers of values. Only shard 0 has these two.
    ``batch`` is the worker's local batch in
    samples, a mean that needn't be whole, ``step_seconds`` the duration of its local steps, and
    ``exchange_seconds`` the least time between two of its last intervals; 0 if unknown.

    ``claims`` is what :mod:`vcasgd.verification` needs, or empty. ``signature`` is the HMAC-SHA256
    of the rest under its worker's key, or empty if workers have no keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    update: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,150}$")
    worker: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")
    shard: _Count = 0
    subtask: _Count
    start: _Count
    stop: _Count
    skipped: _Count = 0
    base: _Count
    rollbacks: _Count = 0
    token: _Count
    codec: str = Field(max_length=32)
    size: _Count
    checksum: int | None = Field(default=None, ge=0, lt=2**64)
    layout: str = Field(max_length=64)
    integers: str = Field(default="", max_length=MAX_INTEGERS_BYTES)
    # Far beyond any real loss; sums of such values stay finite.
    loss_sum: float = Field(default=0.0, ge=-1e200, le=1e200, allow_inf_nan=False)
    weight: float | None = Field(default=None, ge=0, le=1e15, allow_inf_nan=False)
    logged: tuple[Logged, ...] = Field(default=(), max_length=MAX_LOGGED)
    batch: float = Field(default=0.0, ge=0, le=1e9, allow_inf_nan=False)
    step_seconds: float = Field(default=0.0, ge=0, le=1e9, allow_inf_nan=False)
    exchange_seconds: float = Field(default=0.0, ge=0, le=1e9, allow_inf_nan=False)
    claims: str = Field(default="", max_length=512)
    signature: str = Field(default="", max_length=64)

    @property
    def trained(self) -> int:
        """Number of samples that the update was trained with."""
        return self.stop - self.start - self.skipped

    @field_validator("logged")
    @classmethod
    def _each_once(cls, value: tuple[Logged, ...]) -> tuple[Logged, ...]:
        if len({name for name, _, _ in value}) != len(value):
            raise ValueError("a name occurs twice")
        return value

    @property
    def interval_seconds(self) -> float:
        """Seconds for which the worker trained the update."""
        return self.step_seconds * (self.stop - self.start) / max(self.batch, 1.0)

    def signed(self, key: str, keys: TensorKeys) -> Header:
        """Return the header signed with its worker's key, for the shard of ``keys``."""
        return self.model_copy(update={"signature": self._signature(key, keys)})

    def check_signature(self, key: str, keys: TensorKeys) -> None:
        """Check that the worker that the header names signed it for this shard.

        Raises :class:`InvalidUpdate` (:data:`UNSIGNED`).
        """
        expected = self._signature(key, keys).encode()
        # Only the worker itself may write payloads whose names start with its own.
        if not (
            hmac.compare_digest(self.signature.encode(), expected)
            and self.update.startswith(f"{self.worker}.")
        ):
            raise InvalidUpdate(f"not signed by {self.worker}, which it names", reason=UNSIGNED)

    def _signature(self, key: str, keys: TensorKeys) -> str:
        text = keys.prefix + self.model_dump_json(exclude={"signature"})
        return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()

    @classmethod
    def parse(cls, text: bytes) -> Header:
        """Parse and validate a header. Raises :class:`InvalidUpdate` (``header``)."""
        if len(text) > MAX_HEADER_BYTES:
            raise InvalidUpdate("the header is too long", reason="header")
        try:
            header = cls.model_validate_json(text)
        except ValidationError as error:
            raise InvalidUpdate(f"header: {first_mistake(error)}", reason="header") from error
        if header.checksum is None:
            raise InvalidUpdate("header: checksum: is required", reason="header")
        # JSON does not define which of two equal fields counts. A valid header has no nested ones.
        if len(json.loads(text, object_pairs_hook=list)) != len(header.model_fields_set):
            raise InvalidUpdate("header: a field occurs twice", reason="header")
        return header
