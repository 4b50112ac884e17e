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
from support.training import running
from support.waiting import await_truth

from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.servers import Servers

pytestmark = pytest.mark.slow


Build = Callable[..., Harness]


@pytest.fixture(params=KINDS)
def build(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Build]:
    """``build(tensors=1, ledger=False, strict=True, …)`` returns the processes of a job on servers
    with replicas; ``tensors`` counts store nodes."""
    with ExitStack() as stack:

        def make(*, tensors: int = 0, ledger: bool = False, **options: Any) -> Harness:
            def service(name: str, durable: bool) -> Replicated:
                made = replicated(tmp_path / name, request.param, durable=durable, **options)
                return stack.enter_context(made)

            nodes = [service(f"tensors-{node}", False) for node in range(tensors)]
            first = service("ledger", True) if ledger else None
            # Leases outlive a failover, so nothing is trained again because of an expired one.
            harness = Harness(tmp_path, heartbeat=1.0, tensors=nodes, ledger=first)
            stack.callback(lambda: sys.stdout.write(harness.logs()))
            stack.callback(harness.end)
            return harness

        yield make


def fail_over(service: Replicated) -> None:
    old, new = service.kill_primary()
    service.restart(old)
    assert service.primary is new
    assert service.role(old) == "slave"


@pytest.mark.extended
def test_the_primary_of_the_tensors_dies_while_workers_push(build: Build) -> None:
    harness = build(tensors=1)
    training = running(harness, samples=800)

    # When its primary is killed, and later the promoted one
    for _ in range(2):
        fail_over(harness.tensors)
        training.await_more_samples(training.interval)

    training.finish()
    assert training.unexplained_repeats() == 0
    assert harness.server.alive
    assert harness.events(training.job, "restored") == []


@pytest.mark.extended
def test_two_store_nodes_fail_over_independently(build: Build) -> None:
    harness = build(tensors=2)
    training = running(harness, samples=800)

    for node in (1, 0):
        fail_over(harness.nodes[node])
        training.await_more_samples(training.interval, shard=node)

    # Then every sample is applied exactly once in each shard, and none came from a checkpoint
    training.finish()
    assert harness.events(training.job, "restored") == []
    assert harness.events(training.job, "restarted") == []


@pytest.mark.ci
def test_the_primary_of_the_tensors_and_the_parameter_server_die_together(build: Build) -> None:
    harness = build(tensors=1)
    training = running(harness, applied=200, samples=600)

    # When every copy of its model except the replica's dies
    harness.server.kill()
    fail_over(harness.tensors)
    harness.start_server()

    # Then it resumes: applied updates are kept, and the others are pushed again
    training.finish()
    assert harness.events(training.job, "restarted") == []
    assert training.unexplained_repeats() == 0


@pytest.mark.ci
def test_the_primary_of_the_ledger_dies_while_workers_push(build: Build) -> None:
    harness = build(ledger=True)
    training = running(harness, samples=800, subtasks=8)
    events, tokens = harness.jobs.events(training.job), harness.jobs.work(training.job)["tokens"]
    beat = Servers(harness.ledger.connection).all()["node-0"]["token"]

    fail_over(harness.ledger)

    # Then the history continues, and no token is used twice
    await_truth(lambda: harness.jobs.get(training.job).state is JobState.RUNNING)
    assert harness.jobs.events(training.job)[: len(events)] == events
    training.finish()
    assert harness.jobs.work(training.job)["tokens"] >= tokens
    harness.server.kill()
    harness.start_server()
    await_truth(lambda: Servers(harness.ledger.connection).all()["node-0"]["token"] > beat)


@pytest.mark.extended
def test_training_continues_without_the_replica_and_the_job_reports_it(build: Build) -> None:
    # Given a job whose tensors server doesn't require a replica
    harness = build(tensors=1, strict=False, replica_timeout=1.0)
    training = running(harness, samples=1200)

    replica = harness.tensors.replica
    replica.kill()

    await_truth(lambda: harness.events(training.job, "unreplicated"))
    await_truth(lambda: Servers(harness.ledger.connection).all()["node-0"]["unreplicated"])
    training.await_more_samples(100)

    replica.start()
    await_truth(lambda: harness.events(training.job, "replicated"))
    training.finish()
    assert training.unexplained_repeats() == 0
    await_truth(lambda: Servers(harness.ledger.connection).all()["node-0"]["unreplicated"] == {})


def test_updates_that_the_replica_lacks_are_pushed_again(build: Build) -> None:
    """The replica lags while the primary and the parameter server die."""
    # Given a job whose replica is disconnected, and updates that only the primary has applied
    harness = build(tensors=1, strict=False)
    tensors = harness.tensors
    training, names = running(harness, applied=200, samples=600), harness.workers
    old, replica = tensors.primary, tensors.replica
    cut_off(replica)
    applied = TensorKeys(training.job).applied

    def ahead() -> bool:
        here, there = (node.connection.hget(applied, "version") for node in (old, replica))
        return int(here) > int(there)

    await_truth(ahead, interval=0.005)

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
