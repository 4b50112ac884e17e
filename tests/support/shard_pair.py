"""A worker's exchange with shards on real servers, with real parameter servers' shards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from support.harness import RedisServer
from support.servers import Fault, through_proxy
from support.waiting import PATIENCE
from support.world import World
from vcasgd.learning.shards import Cut
from vcasgd.parameter_server.shard import Shard
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.leases import Lease
from vcasgd.store.tensors.snapshot import Meta, Record
from vcasgd.store.tensors.snapshot_store import SnapshotStore
from vcasgd.worker.exchange import Exchange
from vcasgd.worker.update_queue import MAX_UNAPPLIED

#: Updates whose steps are smaller than the model.
COARSE = {"rule": "async-local-sgd", "eta": 1.0, "codec": "int2"}


#: Type of the fixture ``make_pair``.
MakePair = Callable[..., AbstractContextManager["ShardPair"]]


class ShardPair:
    """One job in two shards, or in as many as there are nodes."""

    def __init__(
        self,
        ledger: RedisServer,
        nodes: list[RedisServer],
        storage: Path,
        clients: list[RedisClient],
        max_unapplied: int = MAX_UNAPPLIED,
        **fields: Any,
    ) -> None:
        self.servers, self.max_unapplied = nodes, max_unapplied
        self.nodes = clients
        self.world = World(ledger.connection, self.nodes[0], storage, running=False, **fields)
        layout = self.world.layout
        self.cut = Cut(layout.floats, layout.parameters, len(nodes))
        lease = self.world.leases("first").acquire()
        assert isinstance(lease, Lease)
        facts = {**self.world.facts().to_dict(), "shards": len(nodes)}
        assert self.world.leases("first").report_facts(lease, facts)
        for shard in range(len(nodes)):
            self.install(shard)
        self.exchange = self.exchange_with(patience=10)
        self._named = itertools.count(1)

    def exchange_with(self, patience: float) -> Exchange:
        exchange = Exchange(self.nodes, self.world.job, patience)
        exchange.open(self.cut, self.world.spec.update, self.world.layout, self.max_unapplied)
        return exchange

    def snapshots(self, shard: int) -> SnapshotStore:
        return SnapshotStore(self.nodes[shard], TensorKeys(self.world.job, shard))

    def install(self, shard: int) -> None:
        part, digest = self.cut.parts[shard], self.world.layout.digest()
        meta = Meta(0, 0, part.floats, part.parameters, digest, "AAAAAAAAAAA=" * (shard == 0))
        assert self.snapshots(shard).install(0, meta, Record(), torch.zeros(part.floats))

    def shard(self, number: int, token: int = 1) -> Shard:
        """Return a parameter server's shard."""
        world = self.world
        return Shard(world.jobs.get(world.job), token, tensors=self.nodes[number],
                     ledger=world.ledger, checkpoints=world.checkpoints, number=number)  # fmt: skip

    def publish(self, subtask: int, start: int, stop: int) -> None:
        """Push an update, and publish a version with it."""
        shards = tuple(range(len(self.nodes)))
        self.submit(shards, subtask, start, stop)
        flush(self)
        for shard in shards:
            self.shard(shard).turn()
        self.exchange.settle()

    def submit(
        self,
        shards: tuple[int, ...],
        subtask: int,
        start: int,
        stop: int,
        update: torch.Tensor | None = None,
        *,
        counters: torch.Tensor | None = None,
        keep: bool = False,
    ) -> None:
        """Push the update of an honest worker, which may be in lent memory already."""
        if any(link.version is None for link in self.exchange):
            self.exchange.refresh(again=False)
        fields = {"update": f"u{next(self._named)}", "worker": "w", "subtask": subtask,
                  "start": start, "stop": stop, "token": 1, "loss_sum": 1.0,
                  "layout": self.world.layout.digest()}  # fmt: skip
        whole = self.world.delta(subtask, start, stop) if update is None else update
        self.exchange.push(fields, 0, whole, shards, counters=counters, last=True, keep=keep)

    def published(self) -> torch.Tensor:
        """Return what a new worker would fetch."""
        out = torch.empty(self.world.layout.floats)
        for part in self.cut.parts:
            self.snapshots(part.shard).fetch_rounded(part.of(out))
        return out


@contextmanager
def running_stores(home: Path) -> Iterator[list[RedisServer]]:
    """Run a ledger and two store nodes that pairs use one after the other."""
    with ExitStack() as stack:
        stores = []
        for name in ("ledger", "tensors-0", "tensors-1"):
            stores.append(RedisServer(home / name, durable=False))
            stack.callback(stores[-1].end)
        yield stores


@contextmanager
def pair_of(
    stores: list[RedisServer],
    storage: Path,
    shards: int = 2,
    faults: Mapping[int, Fault] | None = None,
    **fields: Any,
) -> Iterator[ShardPair]:
    """Yield a job; connections to a shard with a fault go through a proxy that has it."""
    ledger, *nodes = stores[: shards + 1]
    for store in (ledger, *nodes):
        _empty(store)
    with ExitStack() as stack:
        clients = []
        for shard, node in enumerate(nodes):
            fault = (faults or {}).get(shard)
            client = closing(node.client()) if fault is None else through_proxy(node, 0, fault)
            clients.append(stack.enter_context(client))
        pair = ShardPair(ledger, nodes, storage, clients, **fields)
        stack.callback(lambda: pair.exchange.close())
        yield pair


def _empty(store: RedisServer) -> None:
    """Bring a server to its first state, also if a test has killed or suspended it."""
    if store.process.alive:
        store.process.thaw()
    else:
        store.start()
    store.connection.flushall()


def flush(pair: ShardPair) -> None:
    assert pair.exchange.flush(PATIENCE), "not everything came into the streams"
