"""The base of a worker's intervals, and the next one while parts of it are fetched."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vcasgd.learning.shards import ShardRange
from vcasgd.learning.vector import Floats, copy_floats, within
from vcasgd.store.tensors.snapshot import Meta, RoundFacts
from vcasgd.worker.shard_link import ShardLink
from vcasgd.worker.vectors import Vector, VectorPool


class BaseVectors:
    """Owned by the training thread.

    The parts of the base may have different versions: each shard is as new as its own store node
    could make it. The next base is fetched into other memory.
    """

    def __init__(self, pool: VectorPool, shards: int) -> None:
        """Without any shards, the base is empty."""
        self._pool = pool
        self._shards = shards
        self._base = pool.take()
        self._next: Vector | None = None
        #: Shards whose part of the base is older than their version.
        self._outdated: set[int] = set()
        #: Its integer state, int64 [k], and the round that made it.
        self.integers, self.round = torch.empty(0, dtype=torch.int64), RoundFacts()

    @property
    def memory(self) -> Floats:
        """The base, float32 [floats]; empty if all of it has to be fetched again."""
        return self._base.memory

    def parts(self, part: ShardRange) -> tuple[Floats, Floats]:
        """Return a shard's parts of the next and of the present base."""
        if self._next is None:
            self._next = self._pool.take()
        vectors = self._next.memory, self._base.memory
        following, present = (within(each, part.start, part.stop) for each in vectors)
        return following, present

    def take_over(self, links: Sequence[ShardLink]) -> None:
        """Make the base of what the links of all shards have fetched."""
        ready = [link for link in links if link.fetched]
        if len(ready) == len(links):
            assert self._next is not None
            self._base, self._next = self._next, self._base
        elif ready:
            self._separate()
        for link in ready:
            if len(ready) < len(links):
                assert self._next is not None
                link.part.of(self._base.memory).copy_(link.part.of(self._next.memory))
            self._describe(link, link.take())
        # A late link may still write its part.
        if self._next and all(link.idle for link in links):
            self._next.release()
            self._next = None
        self._outdated -= {link.part.shard for link in ready}

    def _separate(self) -> None:
        """Copy the base if the start of an interval has the same memory, or there is none."""
        if self._base.shared or not len(self._base.memory):
            base = self._pool.take()
            copy_floats(self._base.memory, base.memory)
            self._base.release()
            self._base = base

    def _describe(self, link: ShardLink, meta: Meta) -> None:
        if link.part.shard == 0:
            self.integers, self.round = meta.integer_vector(), meta.round

    # -- beside a copy of the worker ---------------------------------------------------------------

    def pass_by(self, link: ShardLink, meta: Meta) -> None:
        """Record that a shard has a version, described by ``meta``, that the base lacks."""
        self._describe(link, meta)
        self._outdated.add(link.part.shard)

    def keep_part(self, shard: int) -> None:
        """Record that the caller copies the shard's version into the base."""
        self._outdated.discard(shard)

    def release_outdated(self) -> None:
        """Release the memory if all of the base has to be fetched again before it is needed."""
        if len(self._outdated) == self._shards and len(self._base.memory):
            self._base.release()
            self._base = VectorPool(0).take()
            self._pool.trim()

    def take_outdated(self) -> set[int]:
        """Return the shards whose version the base lacks, once; the caller has them fetched."""
        outdated, self._outdated = self._outdated, set()
        return outdated
