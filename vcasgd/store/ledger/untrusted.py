"""Content of the ledger that workers write, parsed strictly: facts, results, log lines.

A worker may have written anything, so this is the only place that parses it. Everything is
bounded: texts in bytes, numbers in range, nesting by pydantic's parser. Heartbeats have their own
module, :mod:`vcasgd.store.ledger.heartbeats`, because they are valid field by field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vcasgd.errors import CheckpointDamaged
from vcasgd.learning.layout import Layout
from vcasgd.printable import printable

#: Longest entry of a stream and longest result in bytes; real ones have some hundred.
MAX_ENTRY_LENGTH = 1 << 20
#: Longest facts in bytes; a layout has about a hundred for each of a model's tensors.
MAX_FACTS_LENGTH = 1 << 22
#: Characters of a text that people read; the rest is cut.
MAX_TEXT_LENGTH = 20_000
#: Largest count: the largest integer that every JSON parser reads exactly.
LARGEST_COUNT = 2**53 - 1
#: Largest number of floats in a model; 4 TiB.
LARGEST_MODEL = 1 << 40
#: Metrics of an evaluation, and versions in it; jobs have at most 1024 shards.
MAX_METRICS, MAX_VERSIONS = 1000, 1024
#: Characters of a reason, which appears in events and logs.
MAX_REASON_LENGTH = 300

Count = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]
Time = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=255), AfterValidator(printable)]
Text = Annotated[
    str, BeforeValidator(lambda text: text[:MAX_TEXT_LENGTH] if isinstance(text, str) else text),
    AfterValidator(printable),
]  # fmt: skip
_COUNT = re.compile(rb"[0-9]{1,15}")


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
    seconds: Time
    at: Time
    versions: tuple[Count, ...] = Field(default=(), max_length=MAX_VERSIONS)
    samples: Count | None = None
    rollbacks: Count = 0


class LogLine(Content):
    """Line that a worker printed."""

    worker: Name
    at: Time
    line: Text


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
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return (
        f"{where}: {first['msg']}"[:MAX_REASON_LENGTH]
        if where
        else first["msg"][:MAX_REASON_LENGTH]
    )


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
