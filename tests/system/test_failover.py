"""Failover of ledger and tensors server to replicas, with real Sentinels and real workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.harness import Harness, RedisServer
from support.replicated import Replicated, replicated
from support.servers import KINDS
from support.training import Training
from support.waiting import await_truth

from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.servers import Servers

pytestmark = pytest.mark.slow


class ReplicatedStores:
    """The processes of a job on servers of which some have replicas."""

    def __init__(
        self, harness: Harness, nodes: list[Replicated], ledger: Replicated | None
    ) -> None:
        self.harness = harness
        self.nodes = nodes
        self._ledger = ledger

    @property
    def tensors(self) -> Replicated:
        return self.nodes[0]

    @property
    def ledger(self) -> Replicated:
        assert self._ledger is not None
        return self._ledger


Build = Callable[..., ReplicatedStores]


@pytest.fixture(params=KINDS)
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Build]:
    """``build(tensors=1, ledger=False, strict=True, …)``; ``tensors`` counts store nodes."""
    with ExitStack() as stack:
        made: list[ReplicatedStores] = []

        def make(*, tensors: int = 0, ledger: bool = False, **options: Any) -> ReplicatedStores:
            def service(name: str, durable: bool) -> Replicated:
                folder = tmp_path / name
                return stack.enter_context(
                    replicated(folder, request.param, durable=durable, **options)
                )

            nodes = [service(f"tensors-{node}", False) for node in range(tensors)]
            first = service("ledger", True) if ledger else None
            # Leases outlive a failover, so nothing is trained again because of an expired one.
            harness = Harness(tmp_path, heartbeat=1.0, tensors=nodes, ledger=first)
            stack.callback(harness.end)
            made.append(ReplicatedStores(harness, nodes, first))
            return made[-1]

        yield make
        for stores in made:
            sys.stdout.write(stores.harness.logs())


def fail_over(service: Replicated) -> None:
    """Kill the primary; restart it as a replica once the old replica is promoted."""
    old, new = service.kill_primary()
    service.restart(old)
    assert service.primary is new
    assert service.role(old) == "slave"


@pytest.mark.extended
def test_the_primary_of_the_tensors_dies_while_workers_push(build: Build) -> None:
    # Given a running job on a tensors server with a replica
    stores = build(tensors=1)
    training = Training(stores.harness, samples=800)
    training.start(2)
    training.await_more_samples(100)

    # When its primary is killed, and later the promoted one
    for _ in range(2):
        fail_over(stores.tensors)
        training.await_more_samples(training.interval)

    # Then every sample is applied exactly once, and no work was wasted
    training.finish()
    assert training.unexplained_repeats() == 0
    assert stores.harness.server.alive
    assert stores.harness.events(training.job, "restored") == []


@pytest.mark.extended
def test_two_store_nodes_fail_over_independently(build: Build) -> None:
    # Given a running job on two store nodes with a replica each
    stores = build(tensors=2)
    training = Training(stores.harness, samples=800)
    training.start(2)
    training.await_more_samples(100)

    # When one primary dies after the other
    for node in (1, 0):
        fail_over(stores.nodes[node])
        training.await_more_samples(training.interval, shard=node)

    # Then every sample is applied exactly once in each shard, and none came from a checkpoint
    training.finish()
    assert stores.harness.events(training.job, "restored") == []
    assert stores.harness.events(training.job, "restarted") == []


def test_the_primary_of_the_tensors_and_the_parameter_server_die_together(build: Build) -> None:
    # Given a job without any checkpoint
    stores = build(tensors=1)
    training = Training(stores.harness, samples=600)
    training.start(2)
    training.await_more_samples(200)

    # When every copy of its model except the replica's dies
    stores.harness.server.kill()
    fail_over(stores.tensors)
    stores.harness.start_server()

    # Then it resumes: applied updates are kept, and the others are pushed again
    training.finish()
    assert stores.harness.events(training.job, "restarted") == []
    assert training.unexplained_repeats() == 0


@pytest.mark.ci
def test_the_primary_of_the_ledger_dies_while_workers_push(build: Build) -> None:
    # Given a running job on a ledger with a replica
    stores = build(ledger=True)
    harness = stores.harness
    training = Training(harness, samples=800, subtasks=8)
    training.start(2)
    training.await_more_samples(100)
    events, tokens = harness.jobs.events(training.job), harness.jobs.work(training.job)["tokens"]
    beat = Servers(stores.ledger.connection).all()["node-0"]["token"]

    # When its primary is killed
    fail_over(stores.ledger)

    # Then the history continues, and no token is used twice
    await_truth(lambda: harness.jobs.get(training.job).state is JobState.RUNNING)
    assert harness.jobs.events(training.job)[: len(events)] == events
    training.finish()
    assert harness.jobs.work(training.job)["tokens"] >= tokens
    harness.server.kill()
    harness.start_server()
    await_truth(lambda: Servers(stores.ledger.connection).all()["node-0"]["token"] > beat)


@pytest.mark.extended
def test_training_continues_without_the_replica_and_the_job_reports_it(build: Build) -> None:
    # Given a job whose tensors server doesn't require a replica
    stores = build(tensors=1, strict=False, replica_timeout=1.0)
    harness = stores.harness
    training = Training(harness, samples=1200)
    training.start(2)
    training.await_more_samples(100)

    # When the replica dies
    replica = stores.tensors.replica
    replica.kill()

    # Then an event reports it, and updates are still applied
    await_truth(lambda: harness.events(training.job, "unreplicated"))
    await_truth(lambda: Servers(harness.ledger.connection).all()["node-0"]["unreplicated"])
    training.await_more_samples(100)

    # and another event reports its return
    replica.start()
    await_truth(lambda: harness.events(training.job, "replicated"))
    training.finish()
    assert training.unexplained_repeats() == 0
    await_truth(lambda: Servers(harness.ledger.connection).all()["node-0"]["unreplicated"] == {})


def test_updates_that_the_replica_lacks_are_pushed_again(build: Build) -> None:
    """The replica lags while the primary and the parameter server die."""
    # Given a job whose replica is disconnected, and updates that only the primary has applied
    stores = build(tensors=1, strict=False)
    harness, tensors = stores.harness, stores.tensors
    training = Training(harness, samples=600)
    names = training.start(2)
    training.await_more_samples(200)
    old, replica = tensors.primary, tensors.replica
    cut_off(replica)
    applied = TensorKeys(training.job).applied

    def ahead() -> bool:
        here, there = (node.connection.hget(applied, "version") for node in (old, replica))
        return int(here) > int(there)

    await_truth(ahead, interval=0.005)

    # When the primary and the parameter server die
    harness.server.kill()
    newest, behind = (int(node.connection.hget(applied, "version")) for node in (old, replica))
    tensors.kill_primary()
    tensors.restart(old)
    harness.start_server()

    # Then the job resumes from the older state, and the workers still have the missing updates
    assert behind > 0
    await_truth(lambda: sum(training.heartbeat(name).pushed_again or 0 for name in names) >= 1)
    training.finish()
    # On a busy machine, the replica lacks more versions, whose updates workers no longer keep.
    lost = newest - behind - 1
    assert training.unexplained_repeats() <= lost * len(names) * training.interval


def cut_off(replica: RedisServer) -> None:
    """Disconnect it from its primary for good."""
    replica.connection.config_set("masterauth", "wrong")
    replica.connection.execute_command("CLIENT KILL", "TYPE", "master")
    await_truth(lambda: replica.connection.info("replication")["master_link_status"] == "down")
