"""Heartbeats of workers: the JSON that a worker writes to the ledger, parsed strictly."""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from vcasgd.limits import MAX_HEARTBEAT_BYTES
from vcasgd.printable import printable

#: Longest free text in a heartbeat; longer text is cut, because an error message may be long.
MAX_TEXT_LENGTH = 2000
#: Longest name of a machine or a kind of notice.
MAX_NAME_LENGTH = 255
#: Largest count: the largest integer that every JSON parser reads exactly.
LARGEST_COUNT = 2**53 - 1
#: Largest time, duration or read counter; far beyond any real value, and safe to calculate with.
LARGEST_NUMBER = 1e15
#: Valid name of a worker; it can be part of a key, of a pattern, and of a user's name.
_WORKER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
#: Most counters that a data set can report in :attr:`Heartbeat.reading`.
MAX_COUNTERS = 100


def _none_if_invalid(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        return None


def _cut(value: Any) -> Any:
    return value[:MAX_TEXT_LENGTH] if isinstance(value, str) else value


_Optional = WrapValidator(_none_if_invalid)
_Count = Annotated[int | None, Field(ge=0, le=LARGEST_COUNT), _Optional]
_Number = Annotated[float | None, Field(ge=0, le=LARGEST_NUMBER), _Optional]
_Printable = AfterValidator(lambda text: None if text is None else printable(text))
_Name = Annotated[str | None, Field(max_length=MAX_NAME_LENGTH), _Printable, _Optional]
_Text = Annotated[str | None, BeforeValidator(_cut), _Printable, _Optional]
_Counters = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_NAME_LENGTH), AfterValidator(printable)],
        Annotated[int | float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)],
    ]
    | None,
    Field(max_length=MAX_COUNTERS),
    _Optional,
]


class Heartbeat(BaseModel):
    """Status that a worker reports with each heartbeat.

    Workers are untrusted: a field that is missing, has another type, isn't finite, or is out of
    range is None. Unknown fields are dropped. Times are Unix seconds.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    at: _Number = None
    machine: _Name = None
    host: _Name = None
    pid: _Count = None
    #: The current activity, for people.
    doing: _Text = None
    #: Local steps and samples since the process started.
    steps: _Count = None
    samples: _Count = None
    #: Median seconds of a local step over the last push intervals.
    step_seconds: _Number = None
    #: Local steps in the last push interval.
    local_steps: _Count = None
    #: Momentum of the optimizer in the last push interval; None if it isn't tuned.
    momentum: _Number = None
    #: Name of the optimizer if its moments are those of a part of the job's batch.
    uncorrected: _Name = None
    #: Start of the oldest training that isn't pushed yet.
    unpushed_since: _Number = None
    #: Version of the model's first shard in the current base.
    version: _Count = None
    pushes: _Count = None
    #: Seconds of the last push.
    push_seconds: _Number = None
    #: Bytes of pushed updates and of fetched snapshots, as they are encoded on the network, since
    #: the process started. Older workers don't report ``fetched_bytes``.
    pushed_bytes: _Count = None
    fetched_bytes: _Count = None
    pushed_again: _Count = None
    discarded: _Count = None
    #: Pushes that a store node refused, because the worker had no access.
    denied: _Count = None
    unapplied: _Count = None
    resident_bytes: _Count = None
    memory_bytes: _Count = None
    memory_free_bytes: _Count = None
    #: Only reported once the process uses a GPU.
    gpu_memory_bytes: _Count = None
    gpu_memory_free_bytes: _Count = None
    #: The device of this worker, and the GPUs of its machine that workers may use.
    device: _Name = None
    gpus: _Count = None
    cores: _Count = None
    #: Processor time since the last heartbeat; 100 is one core.
    cpu_percent: _Number = None
    #: Counters that the data set keeps of its reads.
    reading: _Counters = None
    #: Kind and time of the notice of eviction.
    notice: _Name = None
    notice_at: _Number = None
    #: Why the worker leaves; None while it stays.
    leaving: _Text = None

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Return the heartbeat, or None if ``text`` isn't a JSON object, or is too long."""
        if len(text) > MAX_HEARTBEAT_BYTES:
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return self.model_dump()


def worker_name(text: bytes) -> str | None:
    """Parse an untrusted name of a worker. Returns None if it is invalid."""
    name = text.decode(errors="replace")
    return name if _WORKER_NAME.fullmatch(name) else None
