"""One observation of the platform serves all readers, however many jobs there are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fleet_records import PACKAGE, job_spec
from support.harness import RedisServer

from vcasgd.api.platform import BLOCK_BYTES, Platform, PlatformState, packed
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[RedisClient]:
    server = RedisServer(tmp_path, durable=False)
    yield server.connection
    server.end()


async def observed(ledger: RedisClient) -> PlatformState:
    platform = Platform(ledger)
    states = await asyncio.gather(*(platform.newest() for _ in range(10)))
    assert all(state is states[0] for state in states)
    return states[0]


def test_observation_takes_few_round_trips_and_readers_share_it(ledger: RedisClient) -> None:
    cost = {}
    for count in (2, 18):
        for _ in range(count):
            Jobs(ledger).submit(job_spec(), PACKAGE)
        before = int(ledger.info("stats")["total_reads_processed"])
        state = asyncio.run(observed(ledger))
        cost[count] = int(ledger.info("stats")["total_reads_processed"]) - before
        assert len(state.parts) == len(state.jobs) + 2
    assert cost[18] <= cost[2] + 3


def test_blocks_have_whole_messages_and_a_bounded_size() -> None:
    found = packed([b"a" * (BLOCK_BYTES // 2)] * 3 + [b"b" * (2 * BLOCK_BYTES)])
    assert [len(each) for each in found] == [BLOCK_BYTES, BLOCK_BYTES // 2, 2 * BLOCK_BYTES]
