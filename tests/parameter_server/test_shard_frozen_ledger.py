"""A shard beside a ledger that is frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.harness import RedisServer
from support.servers import running_server
from support.world import World

Eventually = Callable[..., Any]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[RedisServer, RedisServer]]:
    with (
        running_server("valkey", tmp_path / "ledger") as ledger,
        running_server("valkey", tmp_path / "tensors") as tensors,
    ):
        yield ledger, tensors


def test_a_takeover_serves_before_the_ledger_has_its_report(
    servers: tuple[RedisServer, RedisServer], tmp_path: Path, eventually: Eventually
) -> None:
    # Given an update that waits for a parameter server
    ledger, tensors = servers
    world = World(ledger.connection, tensors.connection, tmp_path / "storage")
    world.push(0, 0, 4)
    with ThreadPoolExecutor(1) as executor:
        shard = world.shard(executor=executor)

        # When one takes over while the ledger is frozen, then it applies and publishes it
        ledger.process.freeze()
        assert shard.turn() == 1
        assert world.snapshots.version() == 1
        world.assert_exact()

        # And the ledger gets the report of the takeover afterwards
        ledger.process.thaw()
        reported = world.ledger_keys.shards
        eventually(lambda: shard.turn() or world.ledger.hget(reported, "0:version") == b"1")
        assert world.jobs.get(world.job).totals["applied"] == 4
