"""Ledger and tensors server with a replica each, under real Sentinels; their primaries die while
real workers push."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.harness import Plain, RedisServer
from support.replicated import Replicated, replicated
from support.servers import KINDS
from support.training import Training
from support.waiting import await_truth

from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.servers import Servers

Eventually = Callable[..., Any]

pytestmark = pytest.mark.slow


class Stage:
    """The loops on servers of which some are replicated."""

    def __init__(self, plain: Plain, nodes: list[Replicated], ledger: Replicated | None) -> None:
        self.plain = plain
        self.nodes = nodes
        self._ledger = ledger

    @property
    def tensors(self) -> Replicated:
        return self.nodes[0]

    @property
    def ledger(self) -> Replicated:
        assert self._ledger is not None
        return self._ledger


Build = Callable[..., Stage]


@pytest.fixture(params=KINDS)
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Build]:
    """``build(tensors=1, ledger=False, strict=True, …)``; ``tensors``: how many store nodes"""
    with ExitStack() as stack:
        stages: list[Stage] = []

        def make(*, tensors: int = 0, ledger: bool = False, **options: Any) -> Stage:
            def service(name: str, durable: bool) -> Replicated:
                folder = tmp_path / name
                return stack.enter_context(
                    replicated(folder, request.param, durable=durable, **options)
                )

            nodes = [service(f"tensors-{node}", False) for node in range(tensors)]
            first = service("ledger", True) if ledger else None
            # leases that outlive a failover: whatever is trained again is trained for its sake
            plain = Plain(tmp_path, heartbeat=1.0, tensors=nodes, ledger=first)
            stack.callback(plain.end)
            stages.append(Stage(plain, nodes, first))
            return stages[-1]

        yield make
        for stage in stages:
            sys.stdout.write(stage.plain.logs())


def fail_over(service: Replicated) -> None:
    """The primary is killed; once the replica has taken its place, it comes back as one."""
    old, new = service.kill_primary()
    service.restart(old)
    assert service.primary is new
    assert service.role(old) == "slave"


def test_the_primary_of_the_tensors_dies_while_workers_push(build: Build) -> None:
    # Given a job at work on a tensors server with a replica
    stage = build(tensors=1)
    training = Training(stage.plain, samples=800)
    training.start(2)
    training.go_on(100)

    # When its primary is killed, and later the other one
    for _ in range(2):
        fail_over(stage.tensors)
        training.go_on(training.interval)

    # Then every sample is applied exactly once, and none was trained for nothing
    training.finish()
    assert training.trained_again() == 0
    assert stage.plain.server.alive
    assert stage.plain.events(training.job, "restored") == []


def test_of_two_store_nodes_each_fails_over_for_itself(build: Build) -> None:
    # Given a job at work on two store nodes with a replica each
    stage = build(tensors=2)
    training = Training(stage.plain, samples=800)
    training.start(2)
    training.go_on(100)

    # When one primary dies after the other
    for node in (1, 0):
        fail_over(stage.nodes[node])
        training.go_on(training.interval, shard=node)

    # Then every sample is applied exactly once in each shard, and none came from a checkpoint
    training.finish()
    assert stage.plain.events(training.job, "restored") == []
    assert stage.plain.events(training.job, "restarted") == []


def test_the_primary_of_the_tensors_and_the_parameter_server_die_together(build: Build) -> None:
    # Given a job without any checkpoint
    stage = build(tensors=1)
    training = Training(stage.plain, samples=600)
    training.start(2)
    training.go_on(200)

    # When all that is in memory of its model dies, but for the replica
    stage.plain.server.kill()
    fail_over(stage.tensors)
    stage.plain.start_server()

    # Then it goes on where it was: what was applied is there, and what was not is pushed again
    training.finish()
    assert stage.plain.events(training.job, "restarted") == []
    assert training.trained_again() == 0


def test_the_primary_of_the_ledger_dies_while_workers_push(
    build: Build, eventually: Eventually
) -> None:
    # Given a job at work on a ledger with a replica
    stage = build(ledger=True)
    plain = stage.plain
    training = Training(plain, samples=800, subtasks=8)
    training.start(2)
    training.go_on(100)
    events, tokens = plain.jobs.events(training.job), plain.jobs.work(training.job)["tokens"]
    beat = Servers(stage.ledger.connection).all()["node-0"]["token"]

    # When its primary is killed
    fail_over(stage.ledger)

    # Then the history goes on where it was, and no token is given out twice
    eventually(lambda: plain.jobs.get(training.job).state is JobState.RUNNING)
    assert plain.jobs.events(training.job)[: len(events)] == events
    training.finish()
    assert plain.jobs.work(training.job)["tokens"] >= tokens
    plain.server.kill()
    plain.start_server()
    eventually(lambda: Servers(stage.ledger.connection).all()["node-0"]["token"] > beat)


def test_a_primary_that_freezes_and_wakes_up_is_not_written_to(build: Build) -> None:
    # Given a job at work
    stage = build(tensors=1)
    training = Training(stage.plain, samples=800)
    training.start(2)
    training.go_on(100)
    old, new = stage.tensors.primary, stage.tensors.replica

    # When the primary freezes, another one is promoted, and the first one wakes up
    old.process.freeze()
    stage.tensors.await_primary(new)
    assert old.process.alive
    old.process.thaw()

    # Then it follows the new one, and nothing that was acknowledged is lost
    stage.tensors.await_replica(old)
    training.finish()
    assert stage.tensors.primary is new
    assert training.trained_again() == 0


def test_without_its_replica_training_goes_on_and_the_job_says_so(
    build: Build, eventually: Eventually
) -> None:
    # Given a job whose tensors server does not insist on a replica
    stage = build(tensors=1, strict=False, replica_timeout=1.0)
    plain = stage.plain
    training = Training(plain, samples=1200)
    training.start(2)
    training.go_on(100)

    # When the replica dies
    replica = stage.tensors.replica
    replica.kill()

    # Then it is said, and updates are applied all the same
    eventually(lambda: plain.events(training.job, "unreplicated"))
    eventually(lambda: Servers(plain.ledger.connection).all()["node-0"]["unreplicated"])
    training.go_on(100)

    # and when it is back, that is said as well
    replica.start()
    eventually(lambda: plain.events(training.job, "replicated"))
    training.finish()
    assert training.trained_again() == 0
    eventually(lambda: Servers(plain.ledger.connection).all()["node-0"]["unreplicated"] == {})


def test_what_the_replica_had_not_got_is_pushed_again(build: Build, eventually: Eventually) -> None:
    """The one case that waiting for the replica is made for: it lags, and both others die."""
    # Given a job whose replica is cut off, and updates that are applied on the primary alone
    stage = build(tensors=1, strict=False)
    plain, tensors = stage.plain, stage.tensors
    training = Training(plain, samples=600)
    names = training.start(2)
    training.go_on(200)
    old, replica = tensors.primary, tensors.replica
    cut_off(replica)
    applied = TensorKeys(training.job).applied

    def ahead() -> bool:
        here, there = (node.connection.hget(applied, "version") for node in (old, replica))
        return int(here) > int(there)

    eventually(ahead, interval=0.005)

    # When the primary and the parameter server die
    plain.server.kill()
    tensors.kill_primary()
    behind = int(replica.connection.hget(applied, "version"))
    tensors.restart(old)
    plain.start_server()

    # Then the job goes on from the older state, and the workers still had what was missing
    assert behind > 0
    eventually(lambda: sum(training.beat(name).pushed_again or 0 for name in names) >= 1)
    training.finish()
    assert training.trained_again() == 0


def cut_off(replica: RedisServer) -> None:
    """It loses its primary, and can't come back to it."""
    replica.connection.config_set("masterauth", "wrong")
    replica.connection.execute_command("CLIENT KILL", "TYPE", "master")
    await_truth(lambda: replica.connection.info("replication")["master_link_status"] == "down")
