"""Faults of one part that must not stop the others: a user's names, and servers that are full."""

from __future__ import annotations

import pytest
from support.harness import Harness
from support.training import Training
from support.waiting import await_truth

from vcasgd.errors import StoreFull
from vcasgd.store.connection import RedisClient
from vcasgd.store.keys import TensorKeys


@pytest.mark.ci
@pytest.mark.parametrize("harness", [0.25], indirect=True)
def test_a_data_set_with_methods_of_its_own_keeps_its_leases(harness: Harness) -> None:
    # A subtask takes more than a lease, which is eight heartbeats.
    training = Training(
        harness, task="named:NamedAudit", samples=80, epochs=1, subtasks=1, step_seconds=0.2
    )
    (name,) = training.start_with_job_loop(1)
    await_truth(lambda: training.heartbeat(name).samples)

    training.await_success()

    assert harness.jobs.work(training.job).get("expired", 0) == 0


@pytest.mark.ci
def test_a_full_ledger_lets_jobs_go_on_and_accepts_no_new_ones(harness: Harness) -> None:
    training = Training(harness, samples=200)
    training.start_with_job_loop()

    # When other data fills the ledger's memory
    ledger = harness.ledger.connection
    ledger.config_set("maxmemory", ledger.info("memory")["used_memory"] + (4 << 20))
    await_truth(lambda: _is_full(ledger))
    # Some of it was freed again, or will be
    ledger.config_set("maxmemory", ledger.info("memory")["used_memory"] - (1 << 20))

    # Then no job is accepted, for a clear reason, a new worker and a restarted server join the job
    with pytest.raises(StoreFull, match="accepts no new jobs"):
        Training(harness)
    harness.server.kill()
    server = harness.start_server()
    training.add_workers(1)

    training.await_success()
    assert server.alive
    assert _is_full(ledger)

    ledger.delete("filler")
    Training(harness)


def _is_full(ledger: RedisClient) -> bool:
    """Write data, and return True once the ledger refuses it."""
    try:
        ledger.rpush("filler", bytes(100_000))
    except StoreFull:
        return True
    return False


@pytest.mark.ci
def test_a_checkpoint_that_cannot_be_read_delays_no_other_job(harness: Harness) -> None:
    # Given a job that has to go back, and a storage that doesn't answer about it
    training = Training(harness)
    server = harness.start_server(entry="support.harness:run_server_with_a_stalled_storage")
    training.add_workers(1)
    harness.start_job_when_ready(training.job)
    training.await_samples(1)
    checkpoint, stalled = harness.checkpoint(training.job), harness.home / "stalled"
    stalled.write_text(training.job)
    back = {"restorations": 1, "undone": []}
    assert harness.jobs.roll_back(training.job, 1, checkpoint, "a test", **back)
    await_truth((harness.home / "stalls").exists)

    # When another job is submitted, then it trains to its end, and heartbeats go on
    other = harness.submit_audit(samples=100, epochs=1)
    harness.start_worker(other)
    harness.start_job_when_ready(other)
    await_truth(lambda: harness.jobs.get(other).finished_epochs == 1)
    assert set(harness.vector(other).tolist()) == {1.0}
    last = harness.server_heartbeat_at()
    await_truth(lambda: harness.server_heartbeat_at() > last)
    assert harness.snapshots(training.job).read().meta.rollbacks == 0, "the fault lasts"

    # And the server can be stopped. Its successor goes back, and the job loses nothing
    assert server.terminate() == 0
    stalled.unlink()
    harness.start_server()
    await_truth(lambda: harness.snapshots(training.job).read().meta.rollbacks == 1)
    training.finish()


@pytest.mark.ci
def test_a_job_says_that_its_parameter_server_fails_again_and_again(harness: Harness) -> None:
    training = Training(harness)
    training.start_with_job_loop()
    training.await_more_samples(20)

    # When the server meets something that nobody foresaw, such as a key of another type
    tensors, key = harness.tensors.connection, TensorKeys(training.job).pins
    tensors.delete(key)
    tensors.set(key, "of another type")

    # Then the job's events name the error, and the job continues once the cause is gone
    (event,) = await_truth(lambda: harness.events(training.job, "server-failing"))
    assert "WRONGTYPE" in event["text"]
    tensors.delete(key)
    training.await_success()
    assert harness.server.alive


@pytest.mark.ci
def test_a_job_says_that_the_tensors_server_has_no_memory_left(harness: Harness) -> None:
    # Given a job, and another one whose only worker was lost
    training, idle = Training(harness), Training(harness)
    training.start_with_job_loop()
    (lost,) = idle.add_workers(1)
    idle.await_samples(1)
    idle.worker(lost).kill()
    harness.jobs.workers.remove(idle.job, lost)
    training.await_more_samples(20)

    # When no version fits any more, then the job's events name the remedy, and it loses nothing
    harness.tensors.connection.config_set("maxmemory", "1")
    (event,) = await_truth(lambda: harness.events(training.job, "store-full"))
    assert "raise VCASGD_TENSORS_MEMORY_MB" in event["text"]
    harness.tensors.connection.config_set("maxmemory", "0")
    training.await_success()
    assert not harness.events(idle.job, "store-full"), "no update of it waits"


def test_a_worker_says_that_the_first_model_does_not_fit(harness: Harness) -> None:
    training = Training(harness)
    harness.start_server()
    harness.start_job_loop()

    # When the tensors server has no memory for a model
    harness.tensors.connection.config_set("maxmemory", "1")
    (worker,) = training.add_workers(1)

    # Then its worker names the remedy, and the job trains once there is memory
    await_truth(lambda: "VCASGD_TENSORS_MEMORY_MB" in (training.heartbeat(worker).doing or ""))
    harness.tensors.connection.config_set("maxmemory", "0")
    training.await_success()


@pytest.mark.ci
def test_a_frozen_ledger_does_not_delay_updates(harness: Harness) -> None:
    # Given two jobs whose workers have all the subtasks that they need
    jobs = [Training(harness, samples=2000, epochs=1, subtasks=1) for _ in range(2)]
    harness.start_server()
    harness.start_job_loop()
    for job in jobs:
        job.add_workers(1)
    for job in jobs:
        job.await_more_samples(job.interval)
    log = harness.home / "server-0.log"
    assert "does not answer" not in log.read_text()

    harness.ledger.process.freeze()
    # Known before the first wait, in which the second job goes on.
    reached = [harness.applied(job.job) for job in jobs]

    # Then each job has many updates applied for each report that the ledger doesn't answer
    for job, before in zip(jobs, reached, strict=True):
        job.await_samples(before + 20 * job.interval)
    assert log.read_text().count("does not answer") < 10
    harness.ledger.process.thaw()
    for job in jobs:
        job.await_success()
