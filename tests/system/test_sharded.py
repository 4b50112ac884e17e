"""A model over three store nodes: each recovers alone, and each shard gets each sample once.

The task that counts holds a whole copy of its counters in every shard.
"""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from support.harness import Harness
from support.training import Training, running
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import SnapshotMissing
from vcasgd.store.keys import TensorKeys

SHARDS = range(3)
#: Seconds in which workers would make another first snapshot.
WAITING_SECONDS = 2.0


def events(training: Training, kind: str) -> list[int]:
    return [each["details"]["shard"] for each in training.harness.events(training.job, kind)]


def advance_without(training: Training, node: int, before: int) -> None:
    """Let the other shards advance while a node is down; ``before`` was applied just before."""
    for shard in SHARDS:
        if shard != node:
            # Less than an interval: a worker may not know yet that its previous updates were
            # applied, and pushes parts of one.
            training.await_samples(before + 1, shard=shard)


def kill_during_push(training: Training, node: int) -> None:
    process = training.harness.nodes[node].process
    before = training.harness.applied(training.job, node)
    process.freeze()
    advance_without(training, node, before)
    workers = training.harness.workers
    await_truth(lambda: any((training.heartbeat(name).unapplied or 0) >= 1 for name in workers))
    process.kill()


def shut_out(training: Training, node: int) -> None:
    """Block writes to a node until the others have a push that it lacks."""
    server = training.harness.nodes[node].connection
    for _ in range(10):
        server.client_pause(round(1000 * PATIENCE), all=False)
        pushed = server.hget(TensorKeys(training.job, node).pushed, "0") or b"0|"
        # The worker may be waiting for the outcome of its previous pushes.
        with suppress(AssertionError):
            target = int(pushed.partition(b"|")[0]) + training.interval
            for shard in SHARDS:
                if shard != node:
                    training.await_samples(target, timeout=10, shard=shard)
            return
        server.client_unpause()
        # Let the worker finish what was blocked, or the next pause stops it at the same place.
        training.await_more_samples(shard=node)
    pytest.fail("the fault did not fire: all pushes went everywhere")


@pytest.mark.ci
def test_evaluations_between_epochs_combine_all_nodes(sharded: Harness) -> None:
    # Given a job of 140 steps that ends within its second epoch
    training = Training(sharded, max_samples=700, evaluate={"every": "24 steps"})
    sharded.start_job_loop()
    training.start(workers=2)

    job = training.await_success()

    assert len(job.evaluations) >= 2
    for each in job.evaluations:
        assert len(each.versions) == 3
        assert (each.samples or 0) >= each.number
        assert each.metrics["applied"] >= (each.samples or 0) / 400 - 1e-6
    assert job.evaluations[-1].number == job.evaluations[-1].samples == 700
    assert job.evaluations[-1].metrics["applied"] == pytest.approx(700 / 400)
    assert job.reason == "all 700 samples are done"


@pytest.mark.slow
@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_a_tensors_server_killed_in_the_middle_of_a_push(sharded: Harness, node: int) -> None:
    training = running(sharded, applied=60)

    # When the others have advanced without it
    kill_during_push(training, node)

    # Then its own parameter server fills it again after its empty restart
    sharded.nodes[node].start()
    training.finish()
    # The event is reported beside the work.
    await_truth(lambda: events(training, "republished") == [node])


@pytest.mark.slow
@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.extended), 2])
def test_a_parameter_server_killed(sharded: Harness, node: int) -> None:
    training = running(sharded, applied=60)

    before = sharded.applied(training.job, node)
    sharded.servers[node].kill()

    advance_without(training, node, before)
    sharded.start_server(node)
    training.finish()


@pytest.mark.slow
@pytest.mark.ci
def test_one_shard_returns_to_a_checkpoint_and_the_others_stay_ahead(sharded: Harness) -> None:
    training = running(sharded, applied=60, samples=800)
    sharded.checkpoint(training.job)
    # More than workers keep, and in this shard, which may be behind.
    training.await_more_samples(100, shard=1)

    kill_during_push(training, 1)
    sharded.servers[1].kill()

    # Then only that shard is restored, and gets the samples that it lacks
    ahead = sharded.applied(training.job, 0)
    sharded.nodes[1].start()
    sharded.start_server(1)
    await_truth(lambda: events(training, "restored") == [1])
    restored = sharded.events(training.job, "restored")[0]["details"]["version"]
    assert restored < sharded.snapshots(training.job, 0).version()
    assert sharded.applied(training.job, 0) >= ahead
    training.finish()
    assert training.repeated_samples() > 0


@pytest.mark.slow
def test_one_shard_restarts_without_a_checkpoint(sharded: Harness) -> None:
    training = running(sharded, applied=60)

    before = sharded.applied(training.job, 2)
    sharded.nodes[2].kill()
    sharded.servers[2].kill()
    advance_without(training, 2, before)
    sharded.nodes[2].start()
    sharded.start_server(2)

    await_truth(lambda: events(training, "restarted") == [2])
    training.finish()
    assert sharded.jobs.get(training.job).facts is not None


@pytest.mark.ci
@pytest.mark.slow
def test_all_servers_of_all_nodes_killed_at_once(sharded: Harness) -> None:
    training = running(sharded, applied=60)
    sharded.checkpoint(training.job)
    training.await_more_samples(40)

    for node in SHARDS:
        sharded.nodes[node].kill()
        sharded.servers[node].kill()
    for node in SHARDS:
        sharded.nodes[node].start()
    sharded.start_servers()

    await_truth(lambda: sorted(events(training, "restored")) == [0, 1, 2])
    training.finish()


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [0.25], indirect=True, ids=["short leases"])
def test_a_worker_killed_between_the_pushes_to_two_shards(sharded: Harness) -> None:
    # Given a worker whose pushes arrive in two shards, and not in the third, which blocks writes
    training = Training(sharded, subtasks=2)
    (first,) = training.start(workers=1)
    training.await_samples(40)
    third = sharded.nodes[1].connection
    shut_out(training, 1)

    connected = third.info("clients")["connected_clients"]
    training.worker(first).kill()
    # Blocked commands die with it; a frozen server would execute them later.
    await_truth(lambda: third.info("clients")["connected_clients"] < connected)
    third.client_unpause()
    positions = [sharded.snapshots(training.job, shard).read().record for shard in SHARDS]
    assert positions[1] != positions[0], "the fault did not fire: every shard got the push"

    training.add_workers(1)
    training.finish()
    assert training.repeated_samples() > 0


@pytest.mark.ci
@pytest.mark.slow
def test_a_slow_node_delays_only_its_shard(sharded: Harness) -> None:
    training = running(sharded, applied=60)

    before = sharded.applied(training.job, 1)
    sharded.nodes[1].process.freeze()
    advance_without(training, 1, before)
    sharded.nodes[1].process.thaw()

    training.finish()
    assert training.unexplained_repeats() == 0


@pytest.mark.slow
@pytest.mark.ci
def test_a_restart_of_one_shard_keeps_another_that_is_only_empty(sharded: Harness) -> None:
    """A first snapshot would replace the model that the other shard's server still has."""
    training = running(sharded, applied=60, samples=800)

    # Given a lost shard, and an empty one whose parameter server is slow to publish again
    sharded.servers[0].freeze()
    # First, because it would publish again.
    sharded.servers[2].kill()
    for node in (0, 2):
        sharded.nodes[node].kill()
        sharded.nodes[node].start()
    sharded.start_server(2)

    await_truth(lambda: events(training, "restarted") == [2])
    await_truth(lambda: sharded.snapshots(training.job, 2).fence())
    # Workers may have no part of the base for shard 0 any more, and then wait for it.
    time.sleep(WAITING_SECONDS)
    with pytest.raises(SnapshotMissing):
        sharded.snapshots(training.job, 0).version()

    sharded.servers[0].thaw()
    training.finish()
    assert events(training, "restarted") == [2]
    await_truth(lambda: events(training, "republished") == [0])


@pytest.mark.ci
@pytest.mark.slow
def test_a_job_that_lacks_store_nodes_reports_it_and_waits(sharded: Harness) -> None:
    training = running(sharded, applied=60)
    before = sharded.applied(training.job)
    for worker in sharded.workers.values():
        worker.terminate()

    # When the processes start with fewer nodes than the model has
    whole = sharded.env["VCASGD_TENSORS_URL"]
    sharded.env["VCASGD_TENSORS_URL"] = whole.split()[0]
    sharded.start_job_loop()
    lost = training.add_workers(1)[0]
    await_truth(lambda: sharded.events(training.job, "store-nodes-missing"))
    await_truth(lambda: "preparing" in (training.heartbeat(lost).doing or ""))
    reports = sharded.events(training.job, "store-nodes-missing")
    assert "VCASGD_TENSORS_URL names 1" in reports[0]["text"]
    assert training.worker(lost).alive
    training.worker(lost).kill()
    assert sharded.applied(training.job) >= before

    sharded.env["VCASGD_TENSORS_URL"] = whole
    training.add_workers(1)
    training.finish()
