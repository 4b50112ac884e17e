"""Shards of one job that fail at the same time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Thread

import torch
from support.waiting import await_truth
from support.world import MakeWorld, lease_of

from vcasgd.learning.shards import Cut
from vcasgd.parameter_server.main import ParameterServer
from vcasgd.settings import Settings
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.servers import Servers, node_name
from vcasgd.store.tensors.snapshot import Record
from vcasgd.store.tensors.snapshot_store import SnapshotStore


def test_a_job_whose_shards_all_fail_ends_no_server(make_world: MakeWorld, tmp_path: Path) -> None:
    # Given a job with two shards on one store node
    world = make_world(running=False)
    lease, floats = lease_of(world.leases("a").acquire()), world.layout.floats
    shards = [SnapshotStore(world.tensors, TensorKeys(world.job, number)) for number in (0, 1)]
    for shard, part in zip(shards, Cut(floats, world.layout.parameters, 2).parts, strict=True):
        meta = replace(world.first_meta(), floats=part.floats, parameters=part.parameters)
        assert shard.install(0, meta, Record(), torch.zeros(part.floats))
    facts = replace(world.facts(), shards=2, nodes=1)
    assert world.leases("a").report_facts(lease, facts.to_dict())
    settings = Settings(storage_url=f"file://{tmp_path}", heartbeat=0.2)
    server = ParameterServer(settings, world.ledger, world.ledger, world.tensors)
    thread = Thread(target=server.run)
    thread.start()
    try:
        await_truth(lambda: all(shard.fence() for shard in shards))

        # When one has to be loaded again, while the other can't be read
        first = shards[0].fence()
        with world.tensors.pipeline(transaction=True) as pipe:
            pipe.hset(TensorKeys(world.job, 0).applied, "token", 7)
            pipe.set(TensorKeys(world.job, 1).pins, "no hash")
            pipe.execute()
        servers = Servers(world.ledger)
        await_truth(lambda: servers.newest_token(node_name(0)) > first or not thread.is_alive())
        with world.tensors.pipeline(transaction=True) as pipe:
            pipe.hset(TensorKeys(world.job, 0).applied, "token", 0)
            pipe.delete(TensorKeys(world.job, 1).pins)
            pipe.execute()

        # Then both are served again
        await_truth(lambda: all(shard.fence() > first for shard in shards) or not thread.is_alive())
        assert thread.is_alive()
    finally:
        server.stop()
        thread.join()
