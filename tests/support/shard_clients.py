"""A worker's client for the only shard of a :class:`~support.world.World`."""

from __future__ import annotations

from typing import Any

from support.world import World
from vcasgd.learning.shards import Cut
from vcasgd.store.connection import RedisClient
from vcasgd.store.tensors.header import Header
from vcasgd.worker.pending_updates import Settled
from vcasgd.worker.shard_client import ShardClient


def client_of(world: World, tensors: RedisClient | None = None) -> ShardClient:
    """Return a client; the caller closes it."""
    (part,) = Cut(world.layout.floats, world.layout.parameters, 1).parts
    return ShardClient(tensors or world.tensors, world.job, part)


def submit(
    world: World, client: ShardClient, subtask: int, start: int, stop: int, **changes: Any
) -> Header:
    """Submit an honest update; ``changes`` are fields of its header."""
    header, payload = world.update(subtask, start, stop, **{"token": 1, **changes})
    client.updates.submit(header, world.plan.epoch_of(subtask), payload)
    return header


def flush(client: ShardClient) -> None:
    assert client.updates.flush(10), "not all updates reached the stream"


def version_of(client: ShardClient) -> tuple[int, int]:
    """Settle the updates; return the present version and its writer.

    Raises the client's error.
    """
    version: tuple[int, int] = client.settle().result(10)
    if client.trouble:
        raise client.trouble
    return version


def settle(client: ShardClient) -> Settled:
    """Return the outcome of the updates. Raises the client's error."""
    version_of(client)
    return client.updates.take_settled()
