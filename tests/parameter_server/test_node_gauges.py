"""Gauges of a store node in its parameter server's heartbeat."""

from __future__ import annotations

from pathlib import Path

from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.quotas import NodeGauges


def test_gauges_of_a_node(tensors: RedisClient) -> None:
    now = [0.0]
    gauges = NodeGauges(tensors, lambda: now[0])
    tensors.xadd("updates", {"a": "b"})
    streams = {"A": "updates"}

    first = gauges.read(streams, {"A": 0})
    now[0] = 2.0
    second = gauges.read(streams, {"A": 5})
    now[0] = 2.5
    third = gauges.read(streams, {"A": 50})

    assert first["queued"] == {"A": 1}
    assert first["memory_used_bytes"] > 100_000
    assert first["replicas"] == 0
    rates = [each["publications_per_second"] for each in (first, second, third)]
    assert rates == [0.0, 2.5, 2.5]


def test_a_node_says_that_its_server_is_full(tensors: RedisClient) -> None:
    before = NodeGauges(tensors).read({}, {})
    tensors.config_set("maxmemory", before["memory_used_bytes"])
    try:
        after = NodeGauges(tensors).read({}, {})
    finally:
        tensors.config_set("maxmemory", 0)

    assert not before["full"]
    assert after["full"]


def test_gauges_of_a_node_whose_server_is_unavailable(tmp_path: Path) -> None:
    unavailable = connect(f"unix://{tmp_path}/none.sock")

    gauges = NodeGauges(unavailable)

    assert gauges.read({"A": "updates"}, {"A": 0}) == {"publications_per_second": 0.0}
