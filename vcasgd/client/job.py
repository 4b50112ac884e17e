"""A job as one object of a program or a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcasgd.client.following import PATIENCE_SECONDS
from vcasgd.client.views import Event, JobView, LogLine, Row, from_row

if TYPE_CHECKING:
    from vcasgd.client.client import Client


@dataclass(frozen=True)
class Job(JobView):
    """A job as it was when the API was asked, and what may be asked about it or done with it.

    Its values never change: :meth:`refreshed`, :meth:`wait` and the commands return it as it is
    then. Methods raise as those of :class:`~vcasgd.Client` do.
    """

    client: Client = field(kw_only=True, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """As the API's JSON has it."""
        return asdict(from_row(JobView, vars(self)))

    def refreshed(self) -> Job:
        """As it is now."""
        return self.client.job(self.id)

    def wait(self, timeout: float | None = None, patience: float = PATIENCE_SECONDS) -> Job:
        """Once it is over, after ``timeout`` seconds at most; without one, however long it takes.

        Raises :class:`~vcasgd.errors.ApiError` where it is not over in time.
        """
        return self.client.wait(self.id, timeout, patience)

    # -- commands -----------------------------------------------------------------------------

    def pause(self) -> Job:
        """Raises :class:`~vcasgd.errors.Conflict` where it is not running."""
        return self.client.pause(self.id)

    def resume(self, max_cost_usd: float | None = None) -> Job:
        """With another budget if one is given, all in all. Raises
        :class:`~vcasgd.errors.Conflict` where it is not paused."""
        return self.client.resume(self.id, max_cost_usd)

    def cancel(self) -> Job:
        """Raises :class:`~vcasgd.errors.Conflict` where it is over."""
        return self.client.cancel(self.id)

    # -- what it says -------------------------------------------------------------------------

    def metrics(self, points: int | None = None, names: Sequence[str] = ()) -> list[Row]:
        """The totals over time as a table: ``pandas.DataFrame(job.metrics())``.

        A row for each point, oldest first, all with the same columns; ``at`` is in Unix seconds,
        and each metric of the task's ``evaluate`` has a column of its own, ``validation.<name>``.
        ``points``: at most so many, spikes included; ``names``: only these columns, beside ``at``.
        """
        return flat(self.client.metrics(self.id, points=points, names=names))

    def events(self, after: str | None = None, follow: bool = False) -> Iterator[Event]:
        """What happened, oldest first; with ``follow`` until it is over."""
        return self.client.events(self.id, after, follow)

    def logs(self, after: str | None = None, follow: bool = False) -> Iterator[LogLine]:
        """Lines that its workers printed, as :meth:`events`."""
        return self.client.logs(self.id, after, follow)

    def machines(self) -> list[Row]:
        """What each machine did for it."""
        return self.client.machines(self.id)

    def workers(self) -> list[Row]:
        """Last heartbeats of its workers."""
        return self.client.workers(self.id)

    def cost(self) -> Row:
        """What its machines have cost so far, in USD."""
        return self.client.cost(self.id)

    def checkpoints(self) -> list[Row]:
        """Oldest first."""
        return self.client.checkpoints(self.id)

    def download(self, path: Path, checkpoint: str | None = None) -> Path:
        """The finished model, or one checkpoint, as a safetensors file; returns where it is."""
        return self.client.download(self.id, path, checkpoint)

    def tensorboard(self, folder: Path, follow: bool = False) -> Path:
        """Its history as TensorBoard event files, in a folder of its own inside ``folder``."""
        return self.client.tensorboard(self.id, folder, follow)


def flat(rows: Sequence[Row]) -> list[Row]:
    """Points of the metrics with a column for each metric of the validation, and no ids."""
    measured = {name: None for row in rows for name in row.get("validation") or ()}
    empty = {f"validation.{name}": None for name in measured}
    return [
        {
            **{name: value for name, value in row.items() if name not in ("id", "validation")},
            **empty,
            **{f"validation.{name}": each for name, each in (row.get("validation") or {}).items()},
        }
        for row in rows
    ]
