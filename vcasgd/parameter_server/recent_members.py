"""The workers of a job's last rounds, to which all workers adapt their local batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import RoundFacts

#: Rounds that a worker can miss in a row and still count. A late one is in the next round again,
#: and in the meantime, the others must not take over its part of the batch.
MOST_MISSED = 2


class RecentMembers:
    """Members of the last rounds, each with its last update and the rounds that it missed since."""

    def __init__(self) -> None:
        self._members: dict[str, tuple[Header, int]] = {}

    def facts(self, present: Mapping[str, Header]) -> RoundFacts:
        """Return the facts of a round with the updates of ``present`` by their workers.

        Recent members that are missing count with their last update. No round without updates has
        facts. ``step_seconds`` is how long a step of all batches would last if each member had the
        part of it that its speed allows: with the plain mean of the durations, one slow member
        would make all fast ones take too many samples.
        """
        members = {name: header for name, (header, _) in self._members.items()} if present else {}
        headers = (members | dict(present)).values()
        timed = [each for each in headers if each.step_seconds and each.batch]
        speed = sum(each.batch / each.step_seconds for each in timed)
        exchanges = [each.exchange_seconds for each in headers if each.exchange_seconds]
        return RoundFacts(
            workers=len(headers),
            batch=sum(each.batch for each in headers),
            step_seconds=sum(each.batch for each in timed) / speed if timed else 0.0,
            exchange_seconds=min(exchanges, default=0.0),
        )

    def share(self, present: Mapping[str, Header]) -> float:
        """Return the part of all members' batches that the updates of ``present`` have, in (0, 1].

        Without the missing ones, their mean is as far from the model as a step of the whole batch,
        but has fewer samples.
        """
        whole = self.facts(present).batch
        return sum(each.batch for each in present.values()) / whole if whole else 1.0

    def end(self, present: Mapping[str, Header]) -> None:
        """End a round with the updates of ``present``."""
        missing = {
            name: (header, missed + 1)
            for name, (header, missed) in self._members.items()
            if missed + 1 < MOST_MISSED
        }
        self._members = missing | {name: (header, 0) for name, header in present.items()}

    def lose(self, workers: Collection[str]) -> None:
        """Forget workers that are known to be lost."""
        for worker in workers:
            self._members.pop(worker, None)
