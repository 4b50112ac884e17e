"""A worker's exchange of updates and snapshots with all shards of its job, beside the training.

The exchange owns all vectors. The training borrows them, from one hand-over to the next:

- :meth:`Exchange.refresh` makes the base as new as possible.
- :meth:`Exchange.start_interval` lends the vector from which an interval starts.
- :meth:`Exchange.lend` lends memory for the interval's update.
- :meth:`Exchange.push` takes the update back, and returns at once.

A worker can also keep its own copy of the model, :attr:`Exchange.copy`. Its training then follows
that instead of calling :meth:`Exchange.refresh` and :meth:`Exchange.push`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vcasgd.errors import SnapshotMissing, StoreError, StoreUnavailable, VcasgdError
from vcasgd.learning.encodings.encoder import Encoder, step_format
from vcasgd.learning.layout import Layout
from vcasgd.learning.shards import Cut
from vcasgd.learning.vector import Floats
from vcasgd.spec.update import Update
from vcasgd.store.connection import RedisClient
from vcasgd.store.tensors.sharded import MAPPED_SHARDS
from vcasgd.store.tensors.snapshot_index import nodes_of
from vcasgd.worker.base_vectors import BaseVectors
from vcasgd.worker.interval import Base, continued, encoded_counters, with_counters
from vcasgd.worker.own_copy import OwnCopy
from vcasgd.worker.shard_link import ShardLink
from vcasgd.worker.update_queue import MAX_UNAPPLIED, Settled
from vcasgd.worker.vectors import Vector, VectorPool

#: Shards that a node and this worker move at a time: enough to keep both busy. More would take the
#: processors from training in bursts.
BUSY_SHARDS = 4
#: Seconds to wait for a node, in addition to twice the time of the fastest one.
LATE_SECONDS = 0.5
#: Seconds between two polls while a server that the worker waits for doesn't answer.
RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class OwnUpdate:
    """Last update of this worker, from whose end the next interval continues."""

    vector: Vector
    shards: Collection[int]
    #: Its changes of integer state, int64 [counted]; None if there are none.
    counters: Tensor | None


class Exchange:
    """Owned by the training thread, which must call :meth:`close`; the heartbeat thread calls
    :meth:`counts`.

    Methods that ask the servers raise :class:`StoreUnavailable` or :class:`SnapshotMissing` if no
    shard answers; otherwise they proceed with the shards that do.
    """

    def __init__(
        self, nodes: Sequence[RedisClient], job: str, patience: float, key: str | None = None
    ) -> None:
        """``patience`` bounds each wait for room, in seconds; ``key`` signs headers of updates."""
        self._nodes = nodes
        self._job = job
        self._patience = patience
        self._key = key
        self._links: tuple[ShardLink, ...] = ()
        #: Number of store nodes of the job, and the node of each shard.
        self.store_nodes = 1
        self._node_of: tuple[RedisClient, ...] = ()
        #: Those of each shard, and the rollbacks before the model that updates are made of.
        self._encoders: list[Encoder] = []
        self._rollbacks = 0
        #: Memory of vectors on the CPU.
        self._pool, self._layout = VectorPool(0), Layout(())
        self._device, self._mapped = torch.device("cpu"), False
        self._bases = BaseVectors(self._pool, 0)
        #: Start of the interval in progress if it isn't the base, and memory for its update.
        self._start: Vector | None = None
        self._lent: Vector | None = None
        self._own: OwnUpdate | None = None
        #: This worker's own copy while it keeps one.
        self.copy: OwnCopy | None = None
        self._discarded = 0
        self._adopts = False

    def open(
        self,
        cut: Cut,
        update: Update,
        layout: Layout,
        max_unapplied: int = MAX_UNAPPLIED,
        *,
        nodes: int | None = None,
        adopts: bool = False,
        device: torch.device | str = "cpu",
        mapped: bool = False,
    ) -> None:
        """Connect to the shards of the job, once their number is known; later calls do nothing.

        ``update`` and ``layout`` determine the encodings. The worker waits while ``max_unapplied``
        of its updates are unapplied, until :meth:`limit_unapplied`. If it ``adopts`` its own copy,
        it doesn't fetch a version that has only its own updates. ``nodes`` is the number of store
        nodes, by default that of the shards. ``device`` is that of the model, unless this process
        has its vectors in parts: ``mapped``.

        Raises :class:`StoreUnavailable` if a shard's store node is missing from the settings.
        """
        if self._links:
            return
        self.store_nodes = nodes or cut.shards
        self._node_of = nodes_of(self._nodes, self.store_nodes, cut.shards, self._job)
        self._adopts = adopts
        self._pool = VectorPool(cut.floats, mapped=mapped)
        self._mapped, self._device = mapped, torch.device("cpu" if mapped else device)
        self._bases, self._layout = BaseVectors(self._pool, cut.shards), layout
        self._encoders = [Encoder(update, layout, part, mapped=mapped) for part in cut.parts]
        most = MAPPED_SHARDS if mapped else BUSY_SHARDS
        vector_slots = {node: threading.Semaphore(most) for node in self._node_of}
        self._links = tuple(
            ShardLink(
                self._node_of[part.shard],
                self._job,
                part,
                self._key,
                max_unapplied=max_unapplied,
                steps=step_format(update, layout, part),
                vector_slots=vector_slots[self._node_of[part.shard]],
            )
            for part in cut.parts
        )

    @property
    def is_open(self) -> bool:
        """True once the number of shards is known."""
        return bool(self._links)

    def __getitem__(self, shard: int) -> ShardLink:
        return self._links[shard]

    def __iter__(self) -> Iterator[ShardLink]:
        return iter(self._links)

    def close(self) -> None:
        """End the threads of all links."""
        if self.copy is not None:
            self.copy.close()
        for link in self._links:
            link.close()

    # -- position of a subtask ---------------------------------------------------------------------

    def begin(self, subtask: int, epoch: int, size: int, token: int) -> list[int]:
        """Return the sample from which each shard lacks a subtask, and end its older leases.

        Samples in updates that aren't pushed yet count as present. A shard that doesn't answer is
        assumed to be where the last one of the others is; if it isn't, it refuses the update.
        Raises :class:`~vcasgd.errors.Fenced` if a newer lease exists.
        """
        calls = {link: link.begin(subtask, epoch, size, token) for link in self._responsive()}
        _wait_for(calls, one_by_one=self._mapped)
        answers = {link: call.result() for link, call in calls.items() if call.done()}
        reached = {link: link.updates.reached(subtask, token) for link in self._links}
        positions = {
            link: max(position, reached[link])
            for link, position in answers.items()
            if position is not None
        }
        if not positions:
            raise self._last_error()
        least = min(positions.values())
        return [positions.get(link, reached[link] or least) for link in self._links]

    # -- updates -----------------------------------------------------------------------------------

    def lend(self) -> Floats:
        """Return memory for the update of an interval, float32 [floats], until :meth:`push`."""
        if self._lent is None:
            self._lent = self._pool.take()
        return self._lent.memory

    def push(
        self,
        fields: Mapping[str, Any],
        epoch: int,
        update: Floats,
        shards: Collection[int],
        *,
        counters: Tensor | None = None,
        last: bool = False,
        keep: bool = False,
    ) -> None:
        """Push an interval's update, float32 [floats], to some shards. Returns at once.

        ``fields`` are those of its headers that all shards have in common, and ``counters`` its
        changes of integer state, int64 [counted]. The ``last`` update carries what encodings have
        kept back. ``keep``: the next interval continues from it.
        """
        fields = {**fields, "integers": encoded_counters(counters)}
        vector = self._lent.hold() if self._lent else None
        for shard in shards:
            link, payload = self._links[shard], self._encoders[shard].encode(update, last=last)
            header = link.header(fields, self._rollbacks, payload)
            link.push(header, epoch, payload, *([vector] if vector else []))
        self._end_interval()
        if vector is not None:
            if keep:
                self._own = OwnUpdate(vector.hold(), shards, counters)
            vector.release()

    def has_residual(self, shards: Collection[int]) -> bool:
        """Return True if an encoding keeps back a part of the updates of one of the shards, or
        will."""
        encoders = [(self._links[shard], self._encoders[shard]) for shard in shards]
        return any(
            encoder.has_residual or not (encoder.is_exact or link.updates.encoded)
            for link, encoder in encoders
        )

    def settle(self) -> Settled:
        """Ask what became of the updates; return the outcomes since the last call.

        A worker that keeps a copy doesn't wait for the answers.
        """
        if self.copy is not None:
            # No interval is in progress.
            self.copy.skip_shifts()
            return self.settle_beside()
        return self._settle({link: link.poll() for link in self._responsive()})

    def settle_beside(self) -> Settled:
        """Do what :meth:`settle` does between two intervals of a worker that keeps a copy."""
        if self.copy is not None:
            self.copy.follow()
        return self._take_settled()

    def _settle(self, polls: Mapping[ShardLink, Future[Any]]) -> Settled:
        _wait_for(polls, one_by_one=self._mapped)
        if self._links and all(link.late or link.last_error for link in self._links):
            raise self._last_error()
        return self._take_settled()

    def wait_for_room(self, shards: Collection[int]) -> Iterator[Settled]:
        """Settle updates until none of the shards is full; yield the outcomes of each poll.

        Yields nothing if there is room already. Each poll is bounded, so the caller can stop
        between two. Raises :class:`StoreUnavailable` after ``patience`` seconds without a change,
        and :class:`SnapshotMissing` if one of the full shards has no model.
        """
        links = [self._links[shard] for shard in shards]
        unapplied = sum(link.updates.unapplied for link in links)
        deadline = time.monotonic() + self._patience
        while any(link.updates.full for link in links):
            yield self._settle({link: link.poll(wait=True) for link in self._responsive()})
            now = sum(link.updates.unapplied for link in links)
            if now < unapplied:
                unapplied, deadline = now, time.monotonic() + self._patience
            for link in links:
                if link.updates.full and isinstance(link.last_error, SnapshotMissing):
                    raise link.last_error
            if any(link.late or link.last_error for link in links):
                # A server that doesn't answer doesn't wait for a commit either.
                time.sleep(RETRY_SECONDS)
            if time.monotonic() > deadline:
                raise StoreUnavailable("the parameter server applies no updates")

    @property
    def settled(self) -> int:
        """Number of this worker's updates, as shard 0 counts them, that the base contains in every
        shard."""
        behind = max(link.updates.added - link.settled for link in self._links)
        return self._links[0].updates.added - behind

    @property
    def missing(self) -> bool:
        """True if a shard is known to have no model."""
        return any(isinstance(link.last_error, SnapshotMissing) for link in self._links)

    def subtasks(self) -> frozenset[int]:
        """Return the subtasks that aren't completely applied in every shard."""
        return frozenset(subtask for link in self._links for subtask in link.updates.subtasks())

    def forget(self, subtask: int) -> None:
        """Drop a subtask, because its lease was lost or is no longer needed."""
        self.drop_copy()
        for link in self._links:
            link.updates.forget(subtask)

    @property
    def push_seconds(self) -> float:
        """Seconds that a push of a whole vector takes at most, by the last ones."""
        seconds: defaultdict[int, float] = defaultdict(float)
        for shard, link in enumerate(self._links):
            # Shards of one node share its network.
            seconds[shard * self.store_nodes // len(self._links)] += link.push_seconds
        return max(seconds.values(), default=0.0)

    @property
    def last_push_seconds(self) -> float:
        """Seconds that the last push to the slowest shard took; 0 before the first one."""
        return max((link.last_push_seconds for link in self._links), default=0.0)

    def flush(self, seconds: float) -> bool:
        """Wait until all updates are in the streams; False if it takes longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        return all(link.flush(deadline - time.monotonic()) for link in self._links)

    def limit_unapplied(self, most: int) -> None:
        """Let the worker wait from now on while ``most`` of its updates are unapplied."""
        for link in self._links:
            link.updates.max_unapplied = most

    def _take_settled(self) -> Settled:
        try:
            outcomes = [link.updates.take_settled() for link in self._links]
        except VcasgdError:
            self.drop_copy()
            raise
        settled = Settled(
            frozenset(subtask for outcome in outcomes for subtask in outcome.rework),
            tuple(rejected for outcome in outcomes for rejected in outcome.rejected),
        )
        if settled.rework or self._discarded != self._count_discarded():
            # The last update may never be in any base.
            self._drop_own()
            self.drop_copy()
            self._discarded = self._count_discarded()
        return settled

    # -- the base ----------------------------------------------------------------------------------

    @property
    def base(self) -> Base:
        """The base as it is here, without this worker's own updates that it lacks."""
        version = self._links[0].version
        assert version is not None
        return Base(
            self._bases.memory,
            self._bases.integers,
            rollbacks=self.rollbacks,
            restorations=min(link.restorations for link in self._links),
            version=version[0],
            round=self._bases.round,
        )

    @property
    def rollbacks(self) -> int:
        """The rollbacks before the base, the lowest of all shards; 0 before the first base."""
        return min((link.rollbacks for link in self._links), default=0)

    def start_interval(self, *, keep_copy: bool = False, loaded: bool = True) -> Base:
        """Return the base with this worker's last update, as far as the base lacks a kept one.

        Its vector may be read until :meth:`push`. With ``keep_copy``, the worker keeps its own copy
        from now on, and the base is where that stands; ``loaded``: the model is at its last state.
        """
        self._end_interval()
        base, own = self.base, self._own
        if self.copy is not None:
            return self._continue_copy(self.copy, base, loaded=loaded)
        if base.rollbacks != self._rollbacks:
            # Nothing of the training that went back is kept.
            self._rollbacks, own = base.rollbacks, None
            for encoder in self._encoders:
                encoder.follow_rollback(base.rollbacks)
        if own is not None:
            lacking = [self._links[shard] for shard in own.shards]
            parts = [link.part for link in lacking if link.lacks_last]
            if parts:
                self._start = self._pool.take()
                base = continued(base, own.vector.memory, parts, out=self._start.memory)
            if 0 in own.shards and self._links[0].lacks_last:
                base = with_counters(base, self._layout, own.counters)
        if keep_copy:
            # What the last update has is in the start, or in the base.
            self.copy = OwnCopy(
                *(base, self._links, self._bases, self._encoders, self._layout, self._device),
                adopts=self._adopts,
                mapped=self._mapped,
            )
            self._discarded = self._count_discarded()
        self._drop_own()
        if keep_copy:
            # Its parts have memory of their own.
            self._pool.trim()
        return base

    def _continue_copy(self, copy: OwnCopy, base: Base, *, loaded: bool) -> Base:
        """Return the base of an interval of the copy, with a vector if the model has to load it."""
        floats, continues = base.floats, loaded and copy.is_loaded
        if not continues:
            self._start = self._pool.take()
            copy.read_start(self._start.memory)
            floats = self._start.memory
        # An interval that fails moves the model.
        copy.is_loaded = False
        return replace(base, floats=floats, integers=copy.integers, continues=continues)

    @property
    def unpushed(self) -> bool:
        """True if the copy has progress that was pushed to some of the shards only."""
        return self.copy is not None and not self.copy.is_even

    @property
    def went_back(self) -> bool:
        """True if the worker's copy has to be given up: see :attr:`OwnCopy.went_back`."""
        return self.copy is not None and self.copy.went_back

    def _count_discarded(self) -> int:
        return sum(link.updates.discarded for link in self._links)

    def drop_copy(self) -> None:
        """Start the next interval from a base again, which :meth:`refresh` has to fetch."""
        if self.copy is None:
            return
        self.copy.close()
        self.copy = None
        for shard in self._bases.take_outdated():
            self._links[shard].version = None

    def refresh(self, *, again: bool) -> Settled:
        """Make the base as new as possible; return the outcomes of updates since the last call.

        A shard that doesn't answer keeps its part of the base. A prefetched snapshot is new enough
        unless ``again`` is True; one that :meth:`wait_for_room` found is. The worker keeps no copy
        of its own any more. Raises :class:`StoreUnavailable` and :class:`SnapshotMissing` if a
        shard has no part yet.
        """
        self.drop_copy()
        polls = {}
        for link in self._responsive():
            waited, link.has_waited = link.has_waited, False
            if not waited and (again or not link.fetched):
                polls[link] = link.poll(newer=True)
        _wait_for(polls, one_by_one=self._mapped)
        _wait_for(self._fetch(self._links), one_by_one=self._mapped)
        self._bases.take_over(self._links)
        for link in self._links:
            while link.version is None and not link.fetched:
                link.poll(newer=True).result()
                for call in self._fetch([link]).values():
                    call.result()
                if link.last_error:
                    raise link.last_error
        self._bases.take_over(self._links)
        return self._take_settled()

    def prefetch(self, seconds: float) -> None:
        """Start to fetch the base that is needed in so many seconds.

        Does nothing if a shard is full with one update: the worker then waits for the next commit,
        and a snapshot from before that would be too old.
        """
        needed_at = time.monotonic() + seconds
        for link in self._links:
            if link.idle and link.updates.max_unapplied > 1:
                link.fetch(*self._bases.parts(link.part), needed_at=needed_at)

    def _fetch(self, links: Sequence[ShardLink]) -> dict[ShardLink, Future[Any]]:
        newer = [link for link in links if link.sees_newer]
        return {link: link.fetch(*self._bases.parts(link.part)) for link in newer}

    def _end_interval(self) -> None:
        """Release what the last interval borrowed."""
        for vector in (self._start, self._lent):
            if vector is not None:
                vector.release()
        self._start = self._lent = None

    def _drop_own(self) -> None:
        if self._own is not None:
            self._own.vector.release()
            self._own = None

    # -- status ------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Any]:
        """Return the counters of the heartbeat. An update in several shards counts once.

        ``fetched_bytes`` contains all snapshots, also those that a newer one replaced while they
        were read, and those of evaluations.
        """
        queues = [link.updates for link in self._links]
        version = self._links[0].version if self._links else None
        return {
            "version": version[0] if version else None,
            "pushes": max((each.sent for each in queues), default=0),
            "unapplied": max((each.unapplied for each in queues), default=0),
            "fetched_bytes": sum(node.bulk_received for node in self._nodes),
            "pushed_bytes": sum(each.sent_bytes for each in queues),
            "pushed_again": sum(each.sent_again for each in queues),
            "discarded": self._count_discarded(),
            "denied": sum(link.denied for link in self._links),
        }

    def _responsive(self) -> list[ShardLink]:
        return [link for link in self._links if not link.late]

    def _last_error(self) -> StoreError:
        errors = (link.last_error for link in self._links if link.last_error is not None)
        return next(errors, StoreUnavailable("no store node answers"))


def _wait_for(calls: Mapping[ShardLink, Future[Any]], *, one_by_one: bool) -> None:
    """Wait until the fastest node has answered, and about as long again for the others, or for each
    further one if calls are made ``one_by_one``.

    The wait is bounded by the time limit of each connection. Raises an error of an answer that
    doesn't pass by itself.
    """
    started, waiting = time.monotonic(), set(calls.values())
    while waiting and not any(
        link.last_error is None for link, call in calls.items() if call.done()
    ):
        waiting = wait(waiting, return_when=FIRST_COMPLETED).not_done
    seconds = time.monotonic() - started + LATE_SECONDS
    answers = wait(waiting, seconds, FIRST_COMPLETED if one_by_one else ALL_COMPLETED)
    while one_by_one and answers.done and answers.not_done:
        answers = wait(answers.not_done, seconds, FIRST_COMPLETED)
    for link, call in calls.items():
        if call.done():
            call.result()
        else:
            link.mark_late()
