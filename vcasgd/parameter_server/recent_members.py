"""The workers of a job's last rounds, to which all workers adapt their local batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median_high

from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.snapshot import RoundFacts

#: Rounds that a worker can miss in a row and still count. A late one is in the next round again,
#: and in the meantime, the others must not take over its part of the batch.
MAX_MISSED = 2
#: Factor by which a member's batch can exceed what its samples show. The last interval of a
#: subtask is short if the batch has just grown.
MAX_LARGER = 8.0
#: Factor by which a member can be faster than the others. One that is faster still gets its part
#: of the batch in several steps.
MAX_FASTER = 16.0


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

        What members claim counts only within :data:`MAX_LARGER` and :data:`MAX_FASTER`.
        Otherwise, one that lies could leave hardly a sample to the others.
        """
        headers = self._with(present)
        batches = _credible_batches(headers)
        durations = {
            name: each.step_seconds
            for name, each in headers.items()
            if each.step_seconds and each.batch
        }
        least = median_high(durations.values()) / MAX_FASTER if durations else 0.0
        timed = sum(batches[name] for name in durations)
        # Zero if a member claims next to nothing as its batch.
        speed = sum(batches[name] / max(each, least) for name, each in durations.items())
        exchanges = [each.exchange_seconds for each in headers.values() if each.exchange_seconds]
        return RoundFacts(
            workers=len(headers),
            batch=sum(batches.values()),
            step_seconds=timed / speed if speed else 0.0,
            exchange_seconds=min(exchanges, default=0.0),
        )

    def share(self, present: Mapping[str, Header]) -> float:
        """Return the part of all members' batches that the updates of ``present`` have, in (0, 1].

        Without the missing ones, their mean is as far from the model as a step of the whole batch,
        but has fewer samples.
        """
        batches = _credible_batches(self._with(present))
        whole = sum(batches.values())
        return sum(batches[name] for name in present) / whole if whole else 1.0

    def _with(self, present: Mapping[str, Header]) -> dict[str, Header]:
        members = {name: header for name, (header, _) in self._members.items()}
        return members | dict(present) if present else {}

    def end(self, present: Mapping[str, Header]) -> None:
        """End a round with the updates of ``present``."""
        missing = {
            name: (header, missed + 1)
            for name, (header, missed) in self._members.items()
            if missed + 1 < MAX_MISSED
        }
        self._members = missing | {name: (header, 0) for name, header in present.items()}

    def lose(self, workers: Collection[str]) -> None:
        """Forget workers that are known to be lost."""
        for worker in workers:
            self._members.pop(worker, None)


def _credible_batches(headers: Mapping[str, Header]) -> dict[str, float]:
    """Return the local batch of each member in samples; all members make about as many steps."""
    samples = {name: each.stop - each.start for name, each in headers.items()}
    steps = [samples[name] / each.batch for name, each in headers.items() if each.batch]
    most = MAX_LARGER / median_high(steps) if steps else 0.0
    return {name: min(each.batch, most * samples[name]) for name, each in headers.items()}
