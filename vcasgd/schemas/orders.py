"""Orders for machines, of any provider. Each machine has these types in memory, and no more."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class WorkerOrder(BaseModel):
    """A worker that a machine has to run. ``start`` differs for each start of its process."""

    model_config = ConfigDict(frozen=True)

    worker: str
    start: str
    job: str
    #: Environment of the process, which contains credentials.
    env: dict[str, str] = Field(repr=False)
