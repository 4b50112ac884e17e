"""A worker's link to the only shard of a :class:`~support.world.World`."""

from __future__ import annotations

from threading import Semaphore
from typing import Any

from support.waiting import PATIENCE
from support.world import World
from vcasgd.learning.shards import Cut
from vcasgd.store.connection import RedisClient
from vcasgd.store.tensors.header import Header
from vcasgd.worker.shard_link import ShardLink
from vcasgd.worker.update_queue import Settled


def link_of(
    world: World, tensors: RedisClient | None = None, vector_slots: Semaphore | None = None
) -> ShardLink:
    """Return a link; the caller closes it."""
    (part,) = Cut(world.layout.floats, world.layout.parameters, 1).parts
    return ShardLink(tensors or world.tensors, world.job, part, vector_slots=vector_slots)


def submit(
    world: World, link: ShardLink, subtask: int, start: int, stop: int, **changes: Any
) -> Header:
    """Submit an honest update; ``changes`` are fields of its header."""
    header, payload = world.update(subtask, start, stop, **{"token": 1, **changes})
    link.push(header, world.plan.epoch_of(subtask), payload)
    return header


def flush(link: ShardLink) -> None:
    assert link.flush(PATIENCE), "not all updates reached the stream"


def version_of(link: ShardLink) -> tuple[int, int]:
    """Settle the updates; return the present version and its writer.

    Raises the link's error.
    """
    version: tuple[int, int] = link.poll().result(PATIENCE)
    if link.last_error:
        raise link.last_error
    return version


def settle(link: ShardLink) -> Settled:
    """Return the outcome of the updates. Raises the link's error."""
    version_of(link)
    return link.updates.take_settled()
