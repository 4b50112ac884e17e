"""All shards of a worker's job, and the base vector that the worker trains from.

The parts of the base may have different versions: each shard is as new as its own store node
could make it. While an interval is trained, the next base is fetched into other memory, from all
nodes at the same time. Nothing is kept for longer than it is needed, because a vector is as large
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
        self._pool = VectorPool((), 0)
        #: Memory of the parts of the next base, by shard, from the start of their fetch.
        self._next: dict[int, Tensor] = {}
        #: Guards it.
        self._taking = threading.Lock()
        #: float32 [floats], from which the next interval starts; [0] if an update has its memory.
        self.base = torch.empty(0)
        #: Parts of the base, by shard, that can't be lost with it.
        self._kept: dict[int, Tensor] = {}
        #: int64 [k], the counters of the base.
        self.base_integers = torch.empty(0, dtype=torch.int64)
        #: Facts of the round that made the base.
        self.base_round = RoundFacts()

    def open(
        self,
        cut: Cut,
        max_unapplied: int = MAX_UNAPPLIED,
        steps: Callable[[ShardRange], StepFormat | None] = lambda _: None,
    ) -> None:
        """Connect to the shards of the job, once their number is known; later calls do nothing.

        The worker waits while ``max_unapplied`` of its updates are unapplied, until
        :meth:`limit_unapplied`. ``steps`` returns the format of the steps that it may fetch.

        Raises :class:`StoreUnavailable` if a shard's store node is missing from the settings.
        """
        if self._clients:
            return
        check_nodes(self._nodes, cut.shards, self._job)
        self._pool = VectorPool(cut.parts, usual=max_unapplied)
        self.base = self._pool.take()
        self._clients = tuple(
            ShardClient(
                self._nodes[part.shard],
                self._job,
                part,
                self._key,
                max_unapplied=max_unapplied,
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
        for client in self._clients:
            # Before outcomes are taken, which would be lost.
            client.updates.check_access()
        outcomes = [client.updates.take_settled() for client in self._clients]
        return Settled(
            frozenset(subtask for each in outcomes for subtask in each.rework),
            tuple(rejected for each in outcomes for rejected in each.rejected),
        )

    def limit_unapplied(self, most: int) -> None:
        """Let the worker wait from now on while ``most`` of its updates are unapplied."""
        self._pool.usual = most
        for client in self._clients:
            client.updates.max_unapplied = most

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
            while client.lacks_base and not client.has_fetched:
                self._refresh(client, again=False).result()
                if client.trouble:
                    raise client.trouble
        self._take_over()
        return self._take_settled()

    def prefetch(self, seconds: float) -> None:
        """Start to fetch the base that is needed in so many seconds."""
        needed_at = time.monotonic() + seconds
        for client in self._clients:
            client.prefetch(
                partial(self._out, client, grow=False), self._base_of(client), needed_at
            )

    def update_memory(self, shards: Collection[int]) -> Tensor:
        """Return the memory for an update of some shards, float32 [floats].

        It may be :attr:`base`, whose life then ends: of each shard, the next base is here or under
        way, has to be fetched after the update is applied, or the base is kept in free memory.
        """
        needed = [
            client
            for client in self._clients
            if client.part.shard not in shards or not self._needs_no_base(client)
        ]
        if len(needed) == len(self._clients):
            return self._pool.take()
        if needed and (memory := self._pool.find()) is not None:
            return memory
        if not self._keep(needed):
            return self._pool.take()
        for client in self._clients:
            if client not in needed:
                client.drop_base()
        # Nothing else may keep the update's memory.
        update, self.base = self.base, torch.empty(0)
        return update

    def _keep(self, clients: Sequence[ShardClient]) -> bool:
        """Copy parts of the base into free memory; return False if there isn't enough."""
        taken: dict[int, Tensor] = {}
        for client in clients:
            memory = self._pool.take_part(client.part, taken.values(), grow=False)
            # Steps may be about to be added to the base where it is.
            if memory is None or client.follows_steps:
                return False
            taken[client.part.shard] = memory
        for client in clients:
            taken[client.part.shard].copy_(self._base_of(client))
        self._kept = taken
        return True

    def keep_part(self, update: Tensor, client: ShardClient) -> Tensor:
        """Return an update, float32 [floats], whose other parts may be overwritten from now on,
        unless they are kept, too."""
        return self._pool.keep_part(update, client.part)

    def _needs_no_base(self, client: ShardClient) -> bool:
        if client.late or self._is_slow(client):
            return False
        if client.is_fetching or client.has_fetched:
            return True
        # Steps lead from the present base to the next one.
        return client.updates.fills_up and not client.follows_steps

    def _is_slow(self, client: ShardClient) -> bool:
        """Return True if an interval would start without waiting for a fetch from the node."""
        fastest = min(each.fetch_seconds for each in self._clients)
        return client.fetch_seconds > 2 * fastest + LATE_SECONDS

    def _refresh(self, client: ShardClient, *, again: bool) -> Future[Any]:
        return client.refresh(*self._target(client), again=again)

    def _target(self, client: ShardClient) -> tuple[Memory, Tensor]:
        """Return where a fetch that the caller waits for goes, and the present base."""
        base = self._base_of(client)
        if not len(base) or client.part.shard in self._next or self._is_slow(client):
            return partial(self._out, client), base
        # No interval needs the base meanwhile, and the node has just answered.
        return (lambda: base if client.claim_base() else self._out(client)), base

    def _base_of(self, client: ShardClient) -> Tensor:
        """Return the base of a shard, float32 [part.floats]; [0] if an update has its memory."""
        kept = self._kept.get(client.part.shard)
        return client.part.of(self.base) if kept is None else kept

    def _out(self, client: ShardClient, *, grow: bool = True) -> Tensor | None:
        """Return where a part of the next base goes; see :meth:`VectorPool.take_part`."""
        part = client.part
        with self._taking:
            if part.shard not in self._next:
                beside = (*self._next.values(), *self._kept.values())
                memory = self._pool.take_part(part, beside, grow=grow)
                if memory is None:
                    return None
                self._next[part.shard] = memory
            return self._next[part.shard]

    def _take_over(self) -> None:
        """Make the base of what was fetched; without a base, once all of it is there."""
        ready = {client.part.shard: client for client in self._clients if client.has_fetched}
        if not len(self.base) and len(ready.keys() | self._kept.keys()) < len(self._clients):
            return
        with self._taking:
            # The others were fetched into the base.
            fetched = {shard: self._next.pop(shard) for shard in ready.keys() & self._next.keys()}
            by_shard, self._kept = self._kept | fetched, {}
        parts = {self._clients[shard].part: taken for shard, taken in by_shard.items()}
        joined = self._pool.join(parts) if len(parts) == len(self._clients) else None
        if joined is not None:
            self.base = joined
        else:
            self.base = self.base if len(self.base) else self._pool.take()
            for part, taken in parts.items():
                part.of(self.base).copy_(taken)
        for shard, client in ready.items():
            meta = client.take()
            if shard == 0:
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
            "denied": sum(each["denied"] for each in counts),
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
