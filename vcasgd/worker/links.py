"""A worker's lines to all shards of its job, and the base that it trains from.

The base is one vector whose parts may be of different versions: each shard is as new as its own
store node could make it. While an interval is trained, the next base is fetched into a second
vector, from all nodes at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch
from torch import Tensor

from vcasgd.errors import SnapshotMissing, StoreError, StoreUnavailable
from vcasgd.learning.shards import Cut
from vcasgd.store.connection import RedisClient
from vcasgd.store.tensors.sharded import check_nodes
from vcasgd.worker.link import Link
from vcasgd.worker.outbox import Settled

#: a node is not waited for any longer than twice the time of the fastest one, and this
LATE_SECONDS = 0.5
#: pause while a server that is waited for is away
SILENT_SECONDS = 0.05


class Links:
    """Owned by the training thread; :meth:`close` must be called. ``patience`` bounds each wait
    for room, in seconds; ``key`` signs the headers of updates.

    Methods that ask raise :class:`StoreUnavailable` or :class:`SnapshotMissing` where no shard
    answers, and go on with those that do otherwise.
    """

    def __init__(
        self,
        nodes: Sequence[RedisClient],
        job: str,
        cut: Cut,
        patience: float,
        key: str | None = None,
    ) -> None:
        """Raises as :func:`~vcasgd.store.tensors.sharded.check_nodes`. No shards: none are known
        yet."""
        check_nodes(nodes, cut.shards, job)
        self._patience = patience
        self._all = [Link(nodes[part.shard], job, part, key) for part in cut.parts]
        self._next = torch.empty(cut.floats)
        #: float32 [floats], what the next interval starts from
        self.base = torch.empty(cut.floats)
        #: int64 [k], its counters
        self.base_integers = torch.empty(0, dtype=torch.int64)

    @property
    def known(self) -> bool:
        """Whether it is known how many shards there are."""
        return bool(self._all)

    def __getitem__(self, shard: int) -> Link:
        return self._all[shard]

    def __iter__(self) -> Iterator[Link]:
        return iter(self._all)

    # -- where a subtask stands ------------------------------------------------------------------

    def begin(self, subtask: int, epoch: int, size: int, token: int) -> list[int]:
        """From which sample each shard lacks a subtask; older leases of it end here.

        What waits here to be pushed need not be trained again. A shard that does not answer is
        taken to stand where the last one of the others does: should it not, it will refuse the
        update. Raises :class:`~vcasgd.errors.Fenced` where a newer lease exists.
        """
        calls = {link: link.begin(subtask, epoch, size, token) for link in self._prompt()}
        _wait_for(calls)
        answers = {link: call.result() for link, call in calls.items() if call.done()}
        reached = {link: link.outbox.reached(subtask, token) for link in self._all}
        known = {
            link: max(position, reached[link])
            for link, position in answers.items()
            if position is not None
        }
        if not known:
            raise self._trouble()
        least = min(known.values())
        return [known.get(link, reached[link] or least) for link in self._all]

    # -- updates -----------------------------------------------------------------------------------

    def settle(self, *, patiently: bool = False) -> None:
        """Asks what became of the updates; see :meth:`collect`. ``patiently``: only after
        something was committed, where an outbox is full; waits a moment for it."""
        _wait_for({link: link.settle(patiently=patiently) for link in self._prompt()})
        if self._all and all(link.late or link.trouble for link in self._all):
            raise self._trouble()

    def collect(self) -> Settled:
        """What was found out since the last time, said once."""
        found = [link.outbox.collect() for link in self._all]
        return Settled(
            frozenset(subtask for each in found for subtask in each.rework),
            tuple(rejected for each in found for rejected in each.rejected),
        )

    def wait_for_room(
        self, shards: Collection[int], give_up: Callable[[], bool], settle: Callable[[], None]
    ) -> bool:
        """Until none of these shards has as many unapplied updates as it may; whether it waited.

        ``settle`` is called again and again, and waits a moment itself. Raises
        :class:`StoreUnavailable` after ``patience`` seconds in which nothing moved, and
        :class:`SnapshotMissing` where one has no model any more.
        """
        deadline = time.monotonic() + self._patience
        links, waited = [self._all[shard] for shard in shards], False
        boxes = [link.outbox for link in links]
        before = sum(box.unapplied for box in boxes)
        while any(box.full for box in boxes) and not give_up():
            settle()
            waited, now = True, sum(box.unapplied for box in boxes)
            if now < before:
                before, deadline = now, time.monotonic() + self._patience
            self._check_models(shards)
            if any(link.late or link.trouble for link in links):
                # one that does not answer does not wait either
                time.sleep(SILENT_SECONDS)
            if time.monotonic() > deadline:
                raise StoreUnavailable("the parameter server applies nothing")
        return waited

    def _check_models(self, shards: Collection[int]) -> None:
        for shard in shards:
            link = self._all[shard]
            if link.outbox.full and isinstance(link.trouble, SnapshotMissing):
                raise link.trouble

    @property
    def missing(self) -> bool:
        """Whether a shard has no model, as far as is known."""
        return any(isinstance(link.trouble, SnapshotMissing) for link in self._all)

    # -- the base ----------------------------------------------------------------------------------

    def refresh(self, *, again: bool) -> None:
        """Makes the base as new as it can be; a shard that does not answer keeps what it has.

        What was prefetched is new enough, unless it is looked for ``again``. Raises
        :class:`StoreUnavailable` and :class:`SnapshotMissing` where a shard has nothing yet.
        """
        _wait_for({link: link.refresh(self._out(link), again=again) for link in self._prompt()})
        self._take_over()
        for link in self._all:
            while link.base is None:
                link.refresh(self._out(link), again=False).result()
                self._take_over()
                if link.trouble:
                    raise link.trouble

    def prefetch(self, seconds: float) -> None:
        """Begins to fetch what will be wanted after so many seconds."""
        needed_at = time.monotonic() + seconds
        for link in self._all:
            link.prefetch(self._out(link), needed_at)

    def _out(self, link: Link) -> Tensor:
        return link.part.of(self._next)

    def _take_over(self) -> None:
        ready = [link for link in self._all if link.has_fetched]
        if len(ready) == len(self._all):
            # nobody writes into either vector now
            self.base, self._next = self._next, self.base
        else:
            for link in ready:
                link.part.of(self.base).copy_(self._out(link))
        for link in ready:
            taken = link.take()
            if link.part.shard == 0:
                self.base_integers = taken.meta.integer_vector()

    # -- all outboxes ------------------------------------------------------------------------------

    def subtasks(self) -> frozenset[int]:
        """Subtasks of which something is not applied yet in some shard."""
        return frozenset(subtask for link in self._all for subtask in link.outbox.subtasks())

    def forget(self, subtask: int) -> None:
        """The lease was lost or the subtask is not wanted any more."""
        for link in self._all:
            link.outbox.forget(subtask)

    def flush(self, seconds: float) -> bool:
        """Waits until everything is in the streams; False where the time was too short."""
        deadline = time.monotonic() + seconds
        return all(link.outbox.flush(deadline - time.monotonic()) for link in self._all)

    def close(self) -> None:
        for link in self._all:
            link.close()

    def counts(self) -> dict[str, int | None]:
        """For the heartbeat. An update is counted once however many shards it has a part in."""
        boxes = [link.outbox for link in self._all]
        first = self._all[0].base if self._all else None
        return {
            "version": first[0] if first else None,
            "pushes": max((box.sent for box in boxes), default=0),
            "pushed_bytes": sum(box.sent_bytes for box in boxes),
            "pushed_again": sum(box.sent_again for box in boxes),
            "discarded": sum(box.discarded for box in boxes),
            "unapplied": max((box.unapplied for box in boxes), default=0),
        }

    # -- inside ------------------------------------------------------------------------------------

    def _prompt(self) -> list[Link]:
        return [link for link in self._all if not link.late]

    def _trouble(self) -> StoreError:
        found = (link.trouble for link in self._all if link.trouble is not None)
        return next(found, StoreUnavailable("no store node answers"))


def _wait_for(calls: Mapping[Link, Future[Any]]) -> None:
    """Until the fastest node has answered, and the others have had about as long again.

    Raises what an answer raises and does not pass by itself.
    """
    started, waiting = time.monotonic(), set(calls.values())
    while waiting and not any(link.trouble is None for link, call in calls.items() if call.done()):
        waiting = wait(waiting, return_when=FIRST_COMPLETED).not_done
    wait(waiting, timeout=time.monotonic() - started + LATE_SECONDS)
    for link, call in calls.items():
        if call.done():
            call.result()
        else:
            link.missed()
