"""One of four volunteers turns hostile: it is named, its work is undone, and the model is good."""

from __future__ import annotations

import pytest
from support.harness import Harness
from support.owned_job import EPOCHS, HOSTILE, SAMPLES, OwnedJob

from vcasgd.store.ledger.job import JobRecord

pytestmark = pytest.mark.extended

#: Accuracy of a job with four honest volunteers.
HONEST_ACCURACY = 0.98


def start(harness: Harness, attack: str | None) -> OwnedJob:
    job = OwnedJob(harness, attack, EPOCHS, {}, push_every=1)
    harness.start_servers()
    harness.start_job_loop()
    for owner in ("alice", "bob", "carol", HOSTILE):
        job.start_worker_of(owner)
    return job


def accuracy(done: JobRecord) -> float:
    return done.evaluations[-1].metrics["accuracy"]


def _is_contained(harness: Harness, attack: str) -> None:
    job = start(harness, attack)
    job.attack_at(EPOCHS * SAMPLES // 2)

    # When one of its owners sends wrong updates from then on
    done = job.await_success()

    # Then this owner is named, gets no more work, and the samples since then are trained again
    job.assert_undone(done)
    assert list(harness.jobs.workers.quarantined(job.job)) == [job.worker_of(HOSTILE)]
    assert accuracy(done) > HONEST_ACCURACY - 0.01


def test_an_owner_that_replays_an_old_update_is_contained(harness: Harness) -> None:
    _is_contained(harness, "replay")


@pytest.mark.parametrize("attack", ["scale", "random"])
def test_other_attacks_are_contained(harness: Harness, attack: str) -> None:
    _is_contained(harness, attack)


def test_honest_volunteers_are_not_accused(harness: Harness) -> None:
    job = start(harness, None)
    done = job.await_success()
    assert job.accused() == []
    assert accuracy(done) == pytest.approx(HONEST_ACCURACY, abs=0.01)
