"""All shards of a worker's job, and the base vector that the worker trains from.

The parts of the base may have different versions: each shard is as new as its own store node
could make it. While an interval is trained, the next base is fetched into a second vector, from
all nodes at the same time. No vector is kept for longer than it is needed, because each is as large
as the model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vcasgd.errors import SnapshotMissing, StoreError, StoreUnavailable
from vcasgd.learning.encodings.steps import StepFormat
from vcasgd.learning.shards import Cut, ShardRange
from vcasgd.store.connection import RedisClient
from vcasgd.store.tensors.model_pins import check_nodes
from vcasgd.store.tensors.snapshot import RoundFacts
from vcasgd.worker.pending_updates import MAX_UNAPPLIED, Settled
from vcasgd.worker.shard_client import Memory, ShardClient
from vcasgd.worker.vector_pool import VectorPool

#: Seconds to wait for a node, in addition to twice the time of the fastest one.
LATE_SECONDS = 0.5
#: Seconds between two rounds while a server that the worker waits for doesn't answer.
RETRY_SECONDS = 0.05


class ShardGroup:
    """Fans out to the clients of all shards. Owned by the training thread, which must call
    :meth:`close`; the heartbeat thread calls :meth:`counts`.

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
        self._clients: tuple[ShardClient, ...] = ()
        self._pool = VectorPool(0)
        #: Vector that the next base is fetched into; None while none is fetched.
        self._next: Tensor | None = None
        #: Guards that it is taken once for all shards.
        self._taking = threading.Lock()
        #: float32 [floats], from which the next interval starts; [0] if an update has its memory.
        self.base = torch.empty(0)
        #: int64 [k], the counters of the base.
        self.base_integers = torch.empty(0, dtype=torch.int64)
        #: Facts of the round that made the base.
        self.base_round = RoundFacts()

    def open(
        self,
        cut: Cut,
        most_unapplied: int = MAX_UNAPPLIED,
        steps: Callable[[ShardRange], StepFormat | None] = lambda _: None,
    ) -> None:
        """Connect to the shards of the job, once their number is known; later calls do nothing.

        The worker waits while ``most_unapplied`` of its updates are unapplied. ``steps`` returns
        the format of the steps that it may fetch.

        Raises :class:`StoreUnavailable` if a shard's store node is missing from the settings.
        """
        if self._clients:
            return
        check_nodes(self._nodes, cut.shards, self._job)
        self._pool = VectorPool(cut.floats)
        self.base = self._pool.take()
        self._clients = tuple(
            ShardClient(
                self._nodes[part.shard],
                self._job,
                part,
                self._key,
                most_unapplied=most_unapplied,
                steps=steps(part),
            )
            for part in cut.parts
        )

    @property
    def is_open(self) -> bool:
        """True once the number of shards is known."""
        return bool(self._clients)

    def __getitem__(self, shard: int) -> ShardClient:
        return self._clients[shard]

    def __iter__(self) -> Iterator[ShardClient]:
        return iter(self._clients)

    def close(self) -> None:
        """End the threads of all clients."""
        for client in self._clients:
            client.close()

    # -- position of a subtask ---------------------------------------------------------------------

    def begin(self, subtask: int, epoch: int, size: int, token: int) -> list[int]:
        """Return the sample from which each shard lacks a subtask, and end its older leases.

        Samples in updates that aren't pushed yet count as present. A shard that doesn't answer is
        assumed to be where the last one of the others is; if it isn't, it refuses the update.
        Raises :class:`~vcasgd.errors.Fenced` if a newer lease exists.
        """
        calls = {each: each.begin(subtask, epoch, size, token) for each in self._responsive()}
        _wait_for(calls)
        answers = {client: call.result() for client, call in calls.items() if call.done()}
        reached = {client: client.updates.reached(subtask, token) for client in self._clients}
        positions = {
            client: max(position, reached[client])
            for client, position in answers.items()
            if position is not None
        }
        if not positions:
            raise self._trouble()
        least = min(positions.values())
        return [positions.get(client, reached[client] or least) for client in self._clients]

    # -- updates -----------------------------------------------------------------------------------

    def settle(self) -> Settled:
        """Ask what became of the updates; return the outcomes since the last call."""
        return self._settle(ShardClient.settle)

    def _settle(self, request: Callable[[ShardClient], Future[Any]]) -> Settled:
        _wait_for({each: request(each) for each in self._responsive()})
        if self._clients and all(each.late or each.trouble for each in self._clients):
            raise self._trouble()
        return self._take_settled()

    def wait_for_room(self, shards: Collection[int]) -> Iterator[Settled]:
        """Settle updates until none of the shards is full; yield the outcomes of each round.

        Yields nothing if there is room already. Each round is bounded, so the caller can stop
        between two. Raises :class:`StoreUnavailable` after ``patience`` seconds without a change,
        and :class:`SnapshotMissing` if one of the full shards has no model.
        """
        clients = [self._clients[shard] for shard in shards]
        unapplied = sum(client.updates.unapplied for client in clients)
        deadline = time.monotonic() + self._patience
        while any(client.updates.full for client in clients):
            yield self._settle(lambda each: each.await_room(*self._target(each)))
            now = sum(client.updates.unapplied for client in clients)
            if now < unapplied:
                unapplied, deadline = now, time.monotonic() + self._patience
            for client in clients:
                if client.updates.full and isinstance(client.trouble, SnapshotMissing):
                    raise client.trouble
            if any(client.late or client.trouble for client in clients):
                # A server that doesn't answer doesn't wait for a commit either.
                time.sleep(RETRY_SECONDS)
            if time.monotonic() > deadline:
                raise StoreUnavailable("the parameter server applies no updates")

    @property
    def missing(self) -> bool:
        """True if a shard is known to have no model."""
        return any(isinstance(client.trouble, SnapshotMissing) for client in self._clients)

    def subtasks(self) -> frozenset[int]:
        """Return the subtasks that aren't completely applied in every shard."""
        return frozenset(
            subtask for client in self._clients for subtask in client.updates.subtasks()
        )

    def forget(self, subtask: int) -> None:
        """Drop a subtask, because its lease was lost or is no longer needed."""
        for client in self._clients:
            client.updates.forget(subtask)

    @property
    def push_seconds(self) -> float:
        """Seconds that a push of a whole vector takes at most, by the last ones."""
        return max((client.updates.push_seconds for client in self._clients), default=0.0)

    def flush(self, seconds: float) -> bool:
        """Wait until all updates are in the streams; False if it takes longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        return all(client.updates.flush(deadline - time.monotonic()) for client in self._clients)

    def _take_settled(self) -> Settled:
        outcomes = [client.updates.take_settled() for client in self._clients]
        return Settled(
            frozenset(subtask for each in outcomes for subtask in each.rework),
            tuple(rejected for each in outcomes for rejected in each.rejected),
        )

    # -- the base ----------------------------------------------------------------------------------

    def refresh(self, *, again: bool) -> Settled:
        """Make the base as new as possible; return the outcomes of updates since the last call.

        A shard that doesn't answer keeps its part of the base. A prefetched snapshot is new enough
        unless ``again`` is True; one of :meth:`wait_for_room` is new enough. Raises
        :class:`StoreUnavailable` and :class:`SnapshotMissing` if a shard has no part yet.
        """
        _wait_for({each: self._refresh(each, again=again) for each in self._responsive()})
        self._take_over()
        for client in self._clients:
            while client.lacks_base:
                self._refresh(client, again=False).result()
                self._take_over()
                if client.trouble:
                    raise client.trouble
        return self._take_settled()

    def prefetch(self, seconds: float) -> None:
        """Start to fetch the base that is needed in so many seconds."""
        needed_at = time.monotonic() + seconds
        for client in self._clients:
            client.prefetch(partial(self._out, client), client.part.of(self.base), needed_at)

    def update_memory(self) -> Tensor:
        """Return the memory for an update, float32 [floats].

        It is :attr:`base`, whose life then ends, if the model has one shard, and the next base is
        here, under way, or fetched whole before an interval starts. With several shards, a silent
        one keeps its part of the base.
        """
        client, *others = self._clients
        is_next_known = client.is_fetching or client.has_fetched
        # Steps lead from the present base to the next one.
        is_free = is_next_known or (client.updates.fills_up and not client.follows_steps)
        if others or client.late or not is_free:
            return self._pool.take()
        client.drop_base()
        # Nothing else may keep the update's memory.
        update, self.base = self.base, torch.empty(0)
        return update

    def _refresh(self, client: ShardClient, *, again: bool) -> Future[Any]:
        return client.refresh(*self._target(client), again=again)

    def _target(self, client: ShardClient) -> tuple[Memory, Tensor]:
        """Return where a fetch that the caller waits for goes, and the present base."""
        base = client.part.of(self.base)
        # No interval needs the base meanwhile. With several shards, those that don't answer in time
        # keep their part of it.
        overwrites = len(self._clients) == 1 and len(self.base) > 0 and self._next is None
        return ((lambda: base) if overwrites else partial(self._out, client)), base

    def _out(self, client: ShardClient) -> Tensor:
        with self._taking:
            if self._next is None:
                self._next = self._pool.take()
            return client.part.of(self._next)

    def _take_over(self) -> None:
        ready = [client for client in self._clients if client.has_fetched]
        if len(ready) == len(self._clients):
            # No thread writes into it now. Without it, the snapshot is in the base already.
            if self._next is not None:
                self.base, self._next = self._next, None
        else:
            for client in ready:
                client.part.of(self.base).copy_(self._out(client))
        for client in ready:
            meta = client.take()
            if client.part.shard == 0:
                self.base_integers = meta.integer_vector()
                self.base_round = meta.round

    @property
    def rollbacks(self) -> int:
        """The rollbacks before the base, the lowest of all shards; 0 before the first base."""
        return min((client.rollbacks for client in self._clients), default=0)

    @property
    def restorations(self) -> int:
        """The restorations before the base, the lowest of all shards; 0 before the first base."""
        return min((client.restorations for client in self._clients), default=0)

    # -- status ------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int | None]:
        """Return the counters of the heartbeat. An update in several shards counts once.

        ``fetched_bytes`` contains all snapshots, also those that a newer one replaced while they
        were read, and those of evaluations.
        """
        clients = self._clients
        counts = [client.updates.counts() for client in clients]
        base = clients[0].base if clients else None
        return {
            "version": base[0] if base else None,
            "pushes": max((each["pushes"] for each in counts), default=0),
            "pushed_bytes": sum(each["pushed_bytes"] for each in counts),
            "fetched_bytes": sum(node.bulk_received for node in self._nodes),
            "pushed_again": sum(each["pushed_again"] for each in counts),
            "discarded": sum(each["discarded"] for each in counts),
            "unapplied": max((each["unapplied"] for each in counts), default=0),
        }

    def _responsive(self) -> list[ShardClient]:
        return [client for client in self._clients if not client.late]

    def _trouble(self) -> StoreError:
        errors = (client.trouble for client in self._clients if client.trouble is not None)
        return next(errors, StoreUnavailable("no store node answers"))


def _wait_for(calls: Mapping[ShardClient, Future[Any]]) -> None:
    """Wait until the fastest node has answered, and about as long again for the others.

    The wait is bounded by the time limit of each connection. Raises an error of an answer that
    doesn't pass by itself.
    """
    started, waiting = time.monotonic(), set(calls.values())
    while waiting and not any(
        client.trouble is None for client, call in calls.items() if call.done()
    ):
        waiting = wait(waiting, return_when=FIRST_COMPLETED).not_done
    wait(waiting, timeout=time.monotonic() - started + LATE_SECONDS)
    for client, call in calls.items():
        if call.done():
            call.result()
        else:
            client.mark_late()
