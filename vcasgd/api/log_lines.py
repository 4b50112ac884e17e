"""Lines of a job's log that a reader asks for: the last ones, of a worker, since a time, or with a
text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vcasgd.store.ledger.events import position_of
from vcasgd.store.ledger.jobs import Jobs

#: Lines that are read from the ledger at a time.
BATCH = 1000
_LARGEST = 2**64 - 1


@dataclass(frozen=True)
class LogFilter:
    """Choice of lines. ``worker`` is a part of a name, ``text`` is compared without case."""

    worker: str = ""
    text: str = ""

    def accepts(self, line: dict[str, Any]) -> bool:
        """Return True if a line is asked for."""
        if self.worker and self.worker not in line["worker"]:
            return False
        return not self.text or self.text.casefold() in line["line"].casefold()


@dataclass
class LogReader:
    """Reads the matching lines of one job, and remembers how far it has read.

    Methods raise :class:`~vcasgd.errors.StoreUnavailable`.
    """

    jobs: Jobs
    filter: LogFilter
    _read: str = field(default="0", init=False)

    def __call__(self, job: str, after: str, *, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` matching lines after an ID, oldest first."""
        at = max(after, self._read, key=position_of)
        found: list[dict[str, Any]] = []
        while len(found) < limit:
            lines = self.jobs.logs(job, at, limit=BATCH)
            for line in lines:
                at = line["id"]
                if self.filter.accepts(line):
                    found.append(line)
                    if len(found) == limit:
                        break
            if len(lines) < BATCH:
                break
        self._read = at
        return found

    def before_last(self, job: str, number: int) -> str:
        """Return the ID after which there are the last ``number`` matching lines."""
        before, left = "+", number
        while lines := self.jobs.logs_before(job, before, limit=BATCH):
            for line in lines:
                before = line["id"]
                left -= self.filter.accepts(line)
                if left == 0:
                    return _just_before(before)
        return "0"


def first_after(seconds: float) -> str:
    """Return the ID after which entries were written at or after a time, in Unix seconds."""
    return f"{max(0, int(seconds * 1000) - 1)}-{_LARGEST}"


def _just_before(entry: str) -> str:
    ms, number = position_of(entry)
    return f"{ms}-{number - 1}" if number else f"{ms - 1}-{_LARGEST}"
