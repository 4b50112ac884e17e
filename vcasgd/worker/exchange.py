"""A worker's exchange of updates and snapshots with all shards of its job, beside the training.

The exchange owns all vectors. The training borrows them, from one hand-over to the next:

- :meth:`Exchange.refresh` makes the base as new as possible.
- :meth:`Exchange.start_interval` lends the vector from which an interval starts.
- :meth:`Exchange.lend` lends memory for the interval's update.
- :meth:`Exchange.push` takes the update back, and returns at once.

A worker can also keep its own copy of the model (:mod:`vcasgd.worker.own_copy`). Its training then
calls :meth:`Exchange.follow` after each local step, instead of :meth:`Exchange.refresh` before each
interval, and :meth:`Exchange.push_copy` instead of :meth:`Exchange.push`, and waits for nothing.
With other workers, it pushes one or a few shards at a time, in turn, as soon as the last ones are
back: :meth:`Exchange.next_turn`.

The parts of the base may have different versions: each shard is as new as its own store node
could make it. The next base is fetched into other memory, from all nodes at the same time.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vcasgd.errors import SnapshotMissing, StoreError, StoreUnavailable, VcasgdError
from vcasgd.learning.encodings.encoder import Encoder, step_format
from vcasgd.learning.encodings.payload import EncodedVector
from vcasgd.learning.layout import Layout
from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.learning.vector import Floats, copy_floats, counted, within
from vcasgd.spec.update import Update
from vcasgd.store.connection import RedisClient
from vcasgd.store.tensors.header import Header
from vcasgd.store.tensors.sharded import MAPPED_SHARDS
from vcasgd.store.tensors.snapshot import Meta, RoundFacts
from vcasgd.store.tensors.snapshot_index import nodes_of
from vcasgd.worker.interval import Base, continued, encoded_counters, with_counters
from vcasgd.worker.own_copy import Difference, OwnCopy, Turn
from vcasgd.worker.shard_link import LinkState, ShardLink
from vcasgd.worker.update_queue import MAX_UNAPPLIED, Settled
from vcasgd.worker.vectors import Vector, VectorPool, await_device

#: Seconds to wait for a node, in addition to twice the time of the fastest one.
LATE_SECONDS = 0.5
#: Seconds between two polls while a server that the worker waits for doesn't answer.
RETRY_SECONDS = 0.05
#: Seconds between two looks for a newer version of a shard that has no update of this worker under
#: way, while it keeps a copy.
LOOK_SECONDS = 1.0


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
        self._encoders: list[Encoder] = []
        #: Guards the encoders: the links' threads encode what a worker's copy has learned.
        self._encoding = threading.Lock()
        #: Memory of vectors on the CPU.
        self._pool, self._layout = VectorPool(0), Layout(())
        self._device, self._mapped = torch.device("cpu"), False
        #: The base, and the next one while parts of it are fetched.
        self._base = self._pool.take()
        self._next: Vector | None = None
        self._integers = torch.empty(0, dtype=torch.int64)
        self._round = RoundFacts()
        #: Start of the interval in progress if it isn't the base, and memory for its update.
        self._start: Vector | None = None
        self._lent: Vector | None = None
        self._own: OwnUpdate | None = None
        #: Rollbacks before the last interval.
        self._rollbacks = 0
        #: This worker's own copy while it keeps one.
        self._copy: OwnCopy | None = None
        #: Shards whose part of the base is older than their version.
        self._stale: set[int] = set()
        #: Seconds of the last exchange of a copy, until they are taken.
        self._exchanged: float | None = None
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
        nodes, by default that of the shards. ``device`` is that of the model, whose vectors this
        process has in parts if they are ``mapped``.

        Raises :class:`StoreUnavailable` if a shard's store node is missing from the settings.
        """
        if self._links:
            return
        self.store_nodes = nodes or cut.shards
        self._node_of = nodes_of(self._nodes, self.store_nodes, cut.shards, self._job)
        self._adopts = adopts
        self._pool = VectorPool(cut.floats, mapped=mapped)
        self._mapped, self._device = mapped, torch.device(device)
        self._base, self._layout = self._pool.take(), layout
        self._encoders = [Encoder(update, layout, part, mapped=mapped) for part in cut.parts]
        most = MAPPED_SHARDS if mapped else 2 * cut.shards
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

    @property
    def shards(self) -> int:
        """Number of shards; 0 until it is known."""
        return len(self._links)

    def __getitem__(self, shard: int) -> ShardLink:
        return self._links[shard]

    def __iter__(self) -> Iterator[ShardLink]:
        return iter(self._links)

    def close(self) -> None:
        """End the threads of all links."""
        if self._copy is not None:
            self._copy.close()
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
            with self._encoding:
                payload = self._encoders[shard].encode(update, last=last)
            header = self._header(fields, shard, codec=payload.codec, size=len(payload))
            self._links[shard].push(header, epoch, payload, *([vector] if vector else []))
        self._end_interval()
        if vector is not None:
            if keep:
                self._own = OwnUpdate(vector.hold(), shards, counters)
            vector.release()

    def _header(self, fields: Mapping[str, Any], shard: int, *, codec: str, size: int) -> Header:
        version = self._links[shard].version
        assert version is not None
        own = {"shard": shard, "base": version[0], "rollbacks": self._rollbacks,
               "codec": codec, "size": size}  # fmt: skip
        if shard:
            own |= {"integers": "", "logged": ()}
        return Header(**{**fields, **own})

    def has_residual(self, shards: Collection[int]) -> bool:
        """Return True if an encoding keeps back a part of the updates of one of the shards."""
        return any(
            self._encoders[shard].has_residual
            or not (self._encoders[shard].is_exact or self._links[shard].updates.encoded)
            for shard in shards
        )

    def settle(self) -> Settled:
        """Ask what became of the updates; return the outcomes since the last call.

        A worker that keeps a copy doesn't wait for the answers.
        """
        if self._copy is not None:
            for _, shift in self.take_shifts():
                # No interval is in progress: the next one loads the start, which has moved.
                shift.release()
                self._copy.is_loaded = False
            return self.settle_beside()
        return self._settle({link: link.poll() for link in self._responsive()})

    def settle_beside(self) -> Settled:
        """Do what :meth:`settle` does between two intervals of a worker that keeps a copy."""
        self.follow()
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
        for link in self._links:
            # Before outcomes are taken, which would be lost.
            link.check_access()
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
            self._base.memory,
            self._integers,
            rollbacks=self.rollbacks,
            restorations=min(link.restorations for link in self._links),
            version=version[0],
            round=self._round,
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
        if self._copy is not None:
            return self._continue_copy(self._copy, base, loaded=loaded)
        if base.rollbacks != self._rollbacks:
            # Nothing of the training that went back is kept.
            self._rollbacks, own = base.rollbacks, None
            with self._encoding:
                for encoder in self._encoders:
                    encoder.reset()
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
            self._copy = OwnCopy(
                [link.part for link in self._links],
                base.floats,
                base.integers,
                self._device,
                [link.settled for link in self._links],
                mapped=self._mapped,
            )
            self._copy.is_loaded = False
            self._discarded = self._count_discarded()
        self._drop_own()
        if keep_copy:
            # Its parts have memory of their own.
            self._pool.trim()
        return base

    def _continue_copy(self, copy: OwnCopy, base: Base, *, loaded: bool) -> Base:
        """Return the base of an interval of the copy, with a vector if the model has to load it."""
        if continues := loaded and copy.is_loaded:
            floats = self._base.memory
        else:
            assert copy.is_even, "what it has learned would be lost"
            for _, shift in self.take_shifts(wait=range(len(self._links))):
                # The starts have moved.
                shift.release()
            self._start = self._pool.take()
            copy.read_start(self._start.memory)
            floats = self._start.memory
        # An interval that fails moves the model.
        copy.is_loaded = False
        return replace(base, floats=floats, integers=copy.integers, continues=continues)

    # -- a copy of its own -------------------------------------------------------------------------

    @property
    def keeps_copy(self) -> bool:
        """True if the worker keeps its own copy of the model."""
        return self._copy is not None

    @property
    def unpushed(self) -> bool:
        """True if the copy has progress that was pushed to some of the shards only."""
        return self._copy is not None and not self._copy.is_even

    @property
    def merging(self) -> bool:
        """True while what the worker's copy has to move by isn't taken."""
        return self._copy is not None and self._copy.merging

    def follow(self) -> None:
        """Continue the exchange beside the training.

        Never waits. Raises errors that don't pass by themselves.
        """
        copy = self._copy
        if copy is None:
            return
        for link, own in zip(self._links, copy.parts, strict=True):
            if own.merging:
                continue
            if link.state is LinkState.FETCHED:
                if link.updates.encoded:
                    self._merge(copy, link)
            elif link.state is LinkState.IDLE:
                self._ask(copy, link)
        self._end_turn(copy)

    def _ask(self, copy: OwnCopy, link: ShardLink) -> None:
        """Continue with a link that waits for nothing."""
        link.check()
        # At once: once the copy is dropped, a version that waits here could be taken for a base.
        if self._adopts and (meta := link.adopt()):
            self._describe(link, meta)
            copy.settle(link.part.shard, link.settled)
            self._release_base()
        elif link.sees_newer:
            link.fetch(*self._memory_of(link))
        elif link.lacks_last:
            link.watch(*self._memory_of(link), adopts=self._adopts)
        elif time.monotonic() - link.asked_at >= LOOK_SECONDS:
            link.poll(newer=True)

    def _merge(self, copy: OwnCopy, link: ShardLink) -> None:
        """Start to move the copy's part to the version that was fetched."""
        shard, (version, base) = link.part.shard, self._memory_of(link)
        self._describe(link, link.take())
        copy.settle(shard, link.settled)
        if self.went_back:
            return
        if link.follows_steps:
            # The next steps lead from it.
            self._stale.discard(shard)
            copy.parts[shard].merge(version, link.settled, link.run, keep=base)
        else:
            self._release_base()
            copy.parts[shard].merge(version, link.settled, link.run)

    def _describe(self, link: ShardLink, meta: Meta) -> None:
        """Record that a shard's part of the base is older than its version ``meta``."""
        if link.part.shard == 0:
            self._integers, self._round = meta.integer_vector(), meta.round
        self._stale.add(link.part.shard)

    def _release_base(self) -> None:
        if len(self._stale) == len(self._links) and len(self._base.memory):
            # It isn't needed before all of it is fetched again.
            self._base.release()
            self._base = VectorPool(0).take()
            self._pool.trim()

    def _end_turn(self, copy: OwnCopy) -> None:
        turn = copy.turn
        if turn is None or any(self._links[shard].lacks_last for shard in turn.shards):
            return
        seconds = time.monotonic() - turn.started_at
        self._exchanged, copy.turn = seconds * len(self._links) / len(turn.shards), None

    def take_exchange_seconds(self) -> float | None:
        """Return how long an exchange of the whole copy takes, once after each exchange."""
        seconds, self._exchanged = self._exchanged, None
        return seconds

    def next_turn(self, count: int) -> tuple[int, ...]:
        """Return the ``count`` shards to push next; none while others are under way.

        They are those that were published the longest ago, so all workers push the same ones,
        however they began.
        """
        copy = self._copy
        if copy is None or any(link.lacks_last for link in self._links):
            return ()
        order = sorted(self._links, key=lambda link: (link.published_at, link.part.shard))
        turn = sorted(link.part.shard for link in order[:count])
        return () if any(copy.parts[shard].merging for shard in turn) else tuple(turn)

    def take_shifts(self, *, wait: Collection[int] = ()) -> list[tuple[ShardRange, Vector]]:
        """Return what parts of the copy have to move by, which the caller releases.

        Waits for the shards to ``wait`` for if their shifts are being computed.
        """
        if self._copy is None:
            return []
        shifts = []
        for link, own in zip(self._links, self._copy.parts, strict=True):
            shift = own.take_shift(wait=link.part.shard in wait)
            if shift is not None:
                shifts.append((link.part, shift))
        return shifts

    def push_copy(
        self,
        fields: Mapping[int, Mapping[str, Any]],
        epoch: int,
        read: Callable[[ShardRange, Floats], None],
        integers: Tensor,
        *,
        last: bool,
    ) -> None:
        """Push what the copy has more in some shards than at their last push.

        ``fields`` are those of each shard's header. ``read(part, out)`` copies a part of the model
        into memory on its device, float32 [part.floats]; ``integers``, int64 [k], are its counters.
        """
        copy = self._copy
        assert copy is not None
        copy.integers = integers
        pushed = {}
        for shard in fields:
            end = copy.parts[shard].lend()
            read(self._links[shard].part, end.memory)
            pushed[shard] = end
        await_device(self._device)
        for shard, end in pushed.items():
            more: dict[str, str] = {}
            if shard == 0:
                before = copy.pushed_integers
                changed = counted(self._layout, before, integers)
                more = {"integers": encoded_counters(changed)}
                copy.pushed_integers = integers
            link = self._links[shard]
            difference = copy.parts[shard].advance(end, link.updates.added + 1)
            end.release()
            header = self._header({**fields[shard], **more}, shard, codec="", size=0)
            encode = partial(self._encode_part, shard, difference, self._rollbacks, last=last)
            link.push(header, epoch, encode, *difference.vectors)
            difference.release()
        copy.is_even, copy.is_loaded = len(fields) == len(self._links), True
        # Another one under way would be measured, too.
        measured = bool(fields) and copy.turn is None
        copy.turn = Turn(tuple(fields), time.monotonic()) if measured else copy.turn

    def _encode_part(
        self, shard: int, difference: Difference, rollbacks: int, *, last: bool
    ) -> EncodedVector:
        vector = self._links[shard].with_vector_slot(difference.compute)
        with self._encoding:
            encoded = self._encoders[shard].encode_part(vector, last=last)
            if rollbacks != self._rollbacks:
                # What it has kept back is of a model that diverged.
                self._encoders[shard].reset()
        return encoded

    @property
    def went_back(self) -> bool:
        """True if the worker's copy has to be given up, because the model went back: to an earlier
        one, or to a server that lacks updates which were applied."""
        copy = self._copy
        return copy is not None and (self.rollbacks != self._rollbacks or copy.fell_back)

    def _count_discarded(self) -> int:
        return sum(link.updates.discarded for link in self._links)

    def drop_copy(self) -> None:
        """Start the next interval from a base again, which :meth:`refresh` has to fetch."""
        if self._copy is None:
            return
        self._copy.close()
        self._copy = None
        for shard in self._stale:
            self._links[shard].version = None
        self._stale.clear()

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
            if not waited and (again or link.state is not LinkState.FETCHED):
                polls[link] = link.poll(newer=True)
        _wait_for(polls, one_by_one=self._mapped)
        _wait_for(self._fetch(self._links), one_by_one=self._mapped)
        self._take_over()
        for link in self._links:
            while link.version is None and link.state is not LinkState.FETCHED:
                link.poll(newer=True).result()
                for call in self._fetch([link]).values():
                    call.result()
                if link.last_error:
                    raise link.last_error
        self._take_over()
        return self._take_settled()

    def prefetch(self, seconds: float) -> None:
        """Start to fetch the base that is needed in so many seconds.

        Does nothing if a shard is full with one update: the worker then waits for the next commit,
        and a snapshot from before that would be too old.
        """
        needed_at = time.monotonic() + seconds
        for link in self._links:
            if link.state is LinkState.IDLE and link.updates.max_unapplied > 1:
                link.fetch(*self._memory_of(link), needed_at=needed_at)

    def _fetch(self, links: Iterable[ShardLink]) -> dict[ShardLink, Future[Any]]:
        return {link: link.fetch(*self._memory_of(link)) for link in links if link.sees_newer}

    def _memory_of(self, link: ShardLink) -> tuple[Floats, Floats]:
        """Return a shard's parts of the next and of the present base."""
        if self._next is None:
            self._next = self._pool.take()
        part, vectors = link.part, (self._next.memory, self._base.memory)
        following, present = (within(each, part.start, part.stop) for each in vectors)
        return following, present

    def _take_over(self) -> None:
        """Make the base of what was fetched."""
        ready = [link for link in self._links if link.state is LinkState.FETCHED]
        if len(ready) == len(self._links):
            assert self._next is not None
            self._base, self._next = self._next, self._base
        elif ready:
            self._own_base()
        for link in ready:
            if len(ready) < len(self._links):
                assert self._next is not None
                link.part.of(self._base.memory).copy_(link.part.of(self._next.memory))
            meta = link.take()
            if link.part.shard == 0:
                self._integers, self._round = meta.integer_vector(), meta.round
        # A late link may still write its part.
        if self._next and all(link.state is LinkState.IDLE for link in self._links):
            self._next.release()
            self._next = None
        self._stale -= {link.part.shard for link in ready}

    def _own_base(self) -> None:
        """Copy the base if the start of an interval has the same memory, or there is none."""
        if self._base.shared or not len(self._base.memory):
            base = self._pool.take()
            copy_floats(self._base.memory, base.memory)
            self._base.release()
            self._base = base

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

    def counts(self) -> dict[str, int | None]:
        """Return the counters of the heartbeat. An update in several shards counts once.

        ``fetched_bytes`` contains all snapshots, also those that a newer one replaced while they
        were read, and those of evaluations.
        """
        counts = [link.counts() for link in self._links]
        version = self._links[0].version if self._links else None
        summed = ("pushed_bytes", "pushed_again", "discarded", "denied")
        return {
            "version": version[0] if version else None,
            "pushes": max((count["pushes"] for count in counts), default=0),
            "unapplied": max((count["unapplied"] for count in counts), default=0),
            "fetched_bytes": sum(node.bulk_received for node in self._nodes),
            **{name: sum(count[name] for count in counts) for name in summed},
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
