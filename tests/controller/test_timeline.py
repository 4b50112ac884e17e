"""What machines did, as the controller writes it, and what a parameter server says of its node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.harness import RedisServer

from vcasgd.controller.fleet.names import worker_name
from vcasgd.controller.fleet.timeline import TimelineRecorder
from vcasgd.fleet.observed import JobDemand, LaunchCounts, Observed, WorkerView
from vcasgd.fleet.providers.base import Instance, InstanceState
from vcasgd.parameter_server.node_gauges import NodeGauges
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.ledger.events import EventLog
from vcasgd.store.ledger.jobs import Jobs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("ledger"), durable=False)
    yield server
    server.end()


@pytest.fixture
def ledger(server: RedisServer) -> RedisClient:
    server.connection.flushall()
    return server.connection


def machine(name: str, state: InstanceState = InstanceState.RUNNING) -> Instance:
    return Instance(
        id=name, pool="local", state=state, launched_at=1.0, notice_at=None, host="",
        price_per_hour=0.5, spot=True, zone="z", instance_type="t",
    )  # fmt: skip


def look(
    *machines: Instance, job: str | None = "A", nodes: str | None = "", paid: str = ""
) -> Observed:
    """``nodes``: that are in the cluster and work for the job; ``paid``: by it."""
    names = (nodes or "").split()
    return Observed(
        cluster="test",
        instances=machines,
        nodes=None if nodes is None else frozenset(names),
        workers=tuple(WorkerView(worker_name(x, "A"), "A", x, alive=True) for x in names),
        jobs=(JobDemand(job, 0, 9, pools=("local",), wants=9, running=True),) if job else (),
        pools=(),
        history=LaunchCounts(since=0.0),
        payers=dict.fromkeys(paid.split(), "A"),
    )


def states(ledger: RedisClient, name: str) -> list[tuple[str, float, float | None]]:
    lane = EventLog(ledger).timelines("A")[name]
    return [(span["state"], span["from"], span["to"]) for span in lane["spans"]]


def test_a_machine_is_told_of_from_the_moment_that_somebody_pays(ledger: RedisClient) -> None:
    timeline = TimelineRecorder(ledger)
    timeline.look(look(machine("i", InstanceState.BOOTING), paid="i"), {}, 2.0)
    timeline.look(look(machine("i"), paid="i"), {}, 3.0)
    timeline.look(look(machine("i"), nodes="i", paid="i"), {}, 4.0)
    timeline.look(look(machine("i", InstanceState.LEAVING), nodes="i"), {}, 5.0)
    timeline.look(look(), {"i": None}, 6.0)

    assert states(ledger, "i") == [
        ("booting", 1.0, 4.0), ("running", 4.0, 5.0), ("notice", 5.0, 6.0), ("dead", 6.0, None),
    ]  # fmt: skip


def test_a_machine_that_was_asked_to_leave_drains(ledger: RedisClient) -> None:
    timeline = TimelineRecorder(ledger)
    timeline.look(look(machine("i"), nodes="i"), {}, 2.0)
    Jobs(ledger).drain("A", worker_name("i", "A"))
    timeline.look(look(machine("i"), nodes="i"), {}, 3.0)
    timeline.look(look(), {"i": "idle"}, 4.0)

    assert [state for state, _, _ in states(ledger, "i")] == [
        "booting", "running", "draining", "dead",
    ]  # fmt: skip
    assert EventLog(ledger).timelines("A")["i"]["reason"] == "idle"


def test_another_controller_goes_on_where_the_first_one_stood(ledger: RedisClient) -> None:
    TimelineRecorder(ledger).look(look(machine("i"), nodes="i"), {}, 2.0)
    second = TimelineRecorder(ledger)
    second.look(look(machine("i"), nodes=None, paid="i"), {}, 3.0)
    second.look(look(), {"i": None}, 4.0)

    assert states(ledger, "i") == [
        ("booting", 1.0, 2.0), ("running", 2.0, 4.0), ("dead", 4.0, None),
    ]  # fmt: skip


def test_a_job_that_is_over_has_no_machines_any_more(ledger: RedisClient) -> None:
    timeline = TimelineRecorder(ledger)
    timeline.look(look(machine("i"), nodes="i"), {}, 2.0)
    timeline.look(look(machine("i"), job=None), {}, 3.0)
    timeline.look(look(machine("i"), job=None), {}, 9.0)

    assert states(ledger, "i")[-1] == ("running", 2.0, 3.0)


def test_nothing_is_written_where_nothing_changed(ledger: RedisClient) -> None:
    timeline = TimelineRecorder(ledger)
    timeline.look(look(machine("i"), nodes="i"), {}, 2.0)
    EventLog(ledger).update_timelines("A", {}, ["i"])
    timeline.look(look(machine("i"), nodes="i"), {}, 3.0)

    assert EventLog(ledger).timelines("A") == {}


# -- store nodes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Of a job, as far as it is counted."""

    job: str
    publications: int
    stream: str = "updates"


def test_a_node_is_described(ledger: RedisClient) -> None:
    now = [0.0]
    gauges = NodeGauges(ledger, lambda: now[0])
    ledger.xadd("updates", {"a": "b"})
    part = Part("A", 0)

    first = gauges.read([part])
    now[0] = 2.0
    second = gauges.read([replace(part, publications=5)])
    now[0] = 2.5
    third = gauges.read([replace(part, publications=50)])

    assert first["queued"] == {"A": 1}
    assert first["memory_used_bytes"] > 100_000
    assert first["replicas"] == 0
    rates = [each["publications_per_second"] for each in (first, second, third)]
    assert rates == [0.0, 2.5, 2.5]


def test_a_node_whose_server_is_away_is_described_all_the_same(tmp_path: Path) -> None:
    away = connect(f"unix://{tmp_path}/none.sock")

    assert NodeGauges(away).read([Part("A", 0)]) == {"publications_per_second": 0.0}
