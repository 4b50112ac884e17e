"""One of four volunteers turns hostile: it is named, its work is undone, and the model is good."""

from __future__ import annotations

import pytest
from support.harness import PATIENCE, Harness
from support.hostile_worker import ATTACK, BEGUN, forged_log
from support.training import TASKS
from support.waiting import await_truth

from vcasgd.store.ledger.job import JobRecord, JobState
from vcasgd.store.ledger.placement import Owners

OWNERS = ("alice", "bob", "carol", "mallory")
SAMPLES, EPOCHS = 800, 12
#: Accuracy of a job with four honest volunteers.
HONEST_ACCURACY = 0.98


class Volunteers:
    """A job that is trained by one machine of each owner, with keys of their own."""

    def __init__(self, harness: Harness, attack: str | None) -> None:
        self.harness, self.attack = harness, attack
        self.begun = harness.home / "attack"
        harness.bind_workers("only the platform knows")
        self.job = harness.submit(
            TASKS,
            task="blobs:Blobs",
            args={"samples": SAMPLES},
            epochs=EPOCHS,
            subtasks_per_epoch=10,
            push_every=1,
            update={"rule": "rounds"},
            checkpoint={"every": "1s", "keep": 50},
        )
        harness.start_servers()
        harness.start_job_loop()
        for owner in OWNERS:
            self._start(owner)

    def _start(self, owner: str) -> None:
        name = f"{self.job}.join-{owner}-1"
        # As the controller does before it starts a worker.
        Owners(self.harness.ledger.connection).place({self.job: {name: owner}})
        options: dict[str, object] = {}
        if owner == OWNERS[-1] and self.attack:
            options = {
                "entry": "support.hostile_worker:run",
                "env": {ATTACK: self.attack, BEGUN: str(self.begun)},
            }
        self.harness.start_worker(self.job, name=name, **options)

    def attack_at(self, samples: int) -> None:
        await_truth(lambda: self.harness.applied(self.job) >= samples, timeout=4 * PATIENCE)
        self.begun.touch()

    def await_success(self) -> JobRecord:
        """Wait for the end; every sample of every epoch must be in the model once."""
        jobs = self.harness.jobs
        await_truth(lambda: jobs.get(self.job).state.over, timeout=8 * PATIENCE)
        done = jobs.get(self.job)
        assert done.state is JobState.SUCCEEDED, done.reason
        assert done.totals["samples"] == done.totals["applied"] == EPOCHS * SAMPLES
        assert done.totals["repeated"] == 0
        return done

    def forged(self) -> int:
        """Return how many updates the hostile owner has forged."""
        log = forged_log(self.begun)
        return log.stat().st_size if log.exists() else 0

    def accused(self) -> list[str]:
        events = self.harness.events(self.job, "owner-quarantined")
        return [event["details"]["owner"] for event in events]


def accuracy(done: JobRecord) -> float:
    return done.evaluations[-1].metrics["accuracy"]


def _is_contained(harness: Harness, attack: str) -> None:
    # Given a job that is half done
    volunteers = Volunteers(harness, attack)
    volunteers.attack_at(EPOCHS * SAMPLES // 2)

    # When one of its owners sends wrong updates from then on
    done = volunteers.await_success()

    # Then this owner is named, and gets no more work
    assert volunteers.accused() == ["mallory"]
    assert list(harness.jobs.workers.quarantined(volunteers.job)) == [
        f"{volunteers.job}.join-mallory-1"
    ]

    # and what it has done is undone: the samples since then are trained again
    (event,) = harness.events(volunteers.job, "rolled-back")
    assert event["details"]["owner"] == "mallory"
    assert done.tuned.learning_rate == 1.0
    assert accuracy(done) > HONEST_ACCURACY - 0.01


@pytest.mark.extended
def test_an_owner_that_replays_an_old_update_is_contained(harness: Harness) -> None:
    _is_contained(harness, "replay")


@pytest.mark.extended
@pytest.mark.parametrize("attack", ["scale", "random"])
def test_other_attacks_are_contained(harness: Harness, attack: str) -> None:
    _is_contained(harness, attack)


@pytest.mark.extended
def test_honest_volunteers_are_not_accused(harness: Harness) -> None:
    volunteers = Volunteers(harness, None)
    done = volunteers.await_success()
    assert volunteers.accused() == []
    assert accuracy(done) == pytest.approx(HONEST_ACCURACY, abs=0.01)
