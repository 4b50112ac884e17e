"""Content of the ledger that workers write, parsed strictly: facts, results, logs, heartbeats.

A worker may have written anything, so this is the only place that parses it. Everything is
bounded: texts in bytes, numbers in range, nesting by pydantic's parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from vcasgd.errors import CheckpointDamaged
from vcasgd.learning.layout import Layout
from vcasgd.limits import MAX_HEARTBEAT_BYTES
from vcasgd.printable import printable
from vcasgd.schemas.base import Count, Name, Number
from vcasgd.schemas.fleet import HeartbeatView
from vcasgd.spec.problems import first_mistake

#: Longest entry of a stream and longest result in bytes; real ones have some hundred.
MAX_ENTRY_LENGTH = 1 << 20
#: Longest facts in bytes; a layout has about a hundred for each of a model's tensors.
MAX_FACTS_LENGTH = 1 << 22
#: Characters of a text that people read; the rest is cut.
MAX_TEXT_LENGTH = 20_000
#: Largest number of floats in a model; 4 TiB.
LARGEST_MODEL = 1 << 40
#: Metrics of an evaluation, and versions in it; jobs have at most 1024 shards.
MAX_METRICS, MAX_VERSIONS = 1000, 1024
#: Characters of a reason, which appears in events and logs.
MAX_REASON_LENGTH = 300

Text = Annotated[
    str, BeforeValidator(lambda text: text[:MAX_TEXT_LENGTH] if isinstance(text, str) else text),
    AfterValidator(printable),
]  # fmt: skip
_COUNT = re.compile(rb"[0-9]{1,15}")
#: Valid name of a worker; it can be part of a key, of a pattern, and of a user's name.
_WORKER_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class Invalid(ValueError):
    """Content of a worker that can't be read. The message is the reason."""


class Content(BaseModel):
    """Base of what workers write. Fields of a newer worker are dropped."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Result(Content):
    """Result of an evaluation."""

    version: Count
    metrics: dict[Name, float] = Field(max_length=MAX_METRICS)
    worker: Name
    seconds: Number
    at: Number
    versions: tuple[Count, ...] = Field(default=(), max_length=MAX_VERSIONS)
    samples: Count | None = None
    rollbacks: Count = 0


#: Where a line comes from: a stream, or logging, of which critical records count as errors.
LogLevel = Literal["out", "err", "debug", "info", "warning", "error"]


class LogLine(Content):
    """Line that a worker printed or logged."""

    worker: Name
    at: Number
    line: Text
    level: LogLevel = "out"


Model = TypeVar("Model", bound=Content)


def parse(model: type[Model], text: bytes, longest: int = MAX_ENTRY_LENGTH) -> Model:
    """Parse JSON of a worker. Raises :class:`Invalid`."""
    check_length(text, longest)
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise Invalid(reason_of(error)) from error


def check_length(text: bytes, longest: int) -> None:
    """Raise :class:`Invalid` if a text is too long."""
    if len(text) > longest:
        raise Invalid(f"{len(text)} bytes, at most {longest} are allowed")


def reason_of(error: ValidationError) -> str:
    """Return the first mistake, with its field, as short text."""
    return first_mistake(error)[:MAX_REASON_LENGTH]


def count(text: bytes) -> int:
    """Parse a count. Raises :class:`Invalid`."""
    if not _COUNT.fullmatch(text):
        raise Invalid(f"{text[:20]!r} is not a count")
    return int(text)


@lru_cache(maxsize=128)
def check_layout(text: str) -> None:
    """Raise :class:`Invalid` if a text is not the layout of a model that can exist."""
    try:
        layout = Layout.from_json(text)
        _ = layout.counters
    except (CheckpointDamaged, RecursionError) as error:
        raise Invalid(f"layout: {error}"[:MAX_REASON_LENGTH]) from error
    least = min((min(entry.shape, default=0) for entry in layout.entries), default=0)
    if min(least, *(entry.offset for entry in layout.entries), 0) < 0:
        raise Invalid("layout: a negative size or offset")
    if layout.floats + layout.integers > LARGEST_MODEL:
        raise Invalid(f"layout: more than {LARGEST_MODEL} numbers")


def log_entry(entry: bytes, fields: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return a line of a log with its ID; if it can't be read, one that says why."""
    at = entry.decode()
    try:
        text = fields.get(b"l")
        if text is None:
            raise Invalid("the field l is missing")
        line = parse(LogLine, text)
    except Invalid as error:
        written = min(int(at.partition("-")[0]) / 1000, 1e15)
        why = f"a worker wrote a line that can't be read: {error}"
        line = LogLine(worker="unknown", at=written, line=why)
    return {"id": at, **line.model_dump()}


#: Start of what a worker does in its last heartbeat; the reason follows.
LEFT = "left: "


class Heartbeat(HeartbeatView):
    """Status that a worker reports with each heartbeat.

    Workers are untrusted: a field that is missing, has another type, isn't finite, or is out of
    range is None. Unknown fields are dropped.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    @field_validator("*", mode="wrap")
    @classmethod
    def _none_if_invalid(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            return None

    @property
    def has_left(self) -> bool:
        """True if this is the last heartbeat of a worker that left in good order."""
        return (self.doing or "").startswith(LEFT)

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Return the heartbeat, or None if ``text`` isn't a JSON object, or is too long."""
        if len(text) > MAX_HEARTBEAT_BYTES:
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None


def worker_name(text: bytes) -> str | None:
    """Parse an untrusted name of a worker. Returns None if it is invalid."""
    name = text.decode(errors="replace")
    return name if _WORKER_NAME.fullmatch(name) else None
