"""Machines whose data differ from those of the others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from support.harness import Harness
from support.training import Training
from support.waiting import await_truth

from vcasgd.store.ledger.job import JobState
from vcasgd.worker_names import worker_name

SAMPLES = 100


class Machines:
    def __init__(self, harness: Harness, epochs: int = 2) -> None:
        self.harness = harness
        self.training = Training(
            harness, samples=SAMPLES, task="local:Local", subtasks=4, epochs=epochs
        )
        harness.start_server()
        harness.start_job_loop()

    def folder(self, number: int) -> Path:
        return self.harness.home / f"data-{number}"

    def start(self, number: int, data: Iterable[int] | None) -> str:
        """Start a machine, whose n-th file contains the n-th number; None for no folder."""
        folder = self.folder(number)
        if data is not None:
            folder.mkdir()
        # As if the machine listed its files in another order.
        for position, sample in enumerate(data or ()):
            (folder / f"{position:03}").write_text(str(sample))
        job = self.training.job
        name = worker_name(f"i-{number}", job)
        return self.harness.start_worker(job, name=name, env={"DATA": str(folder)})


@pytest.fixture
def machines(harness: Harness) -> Machines:
    return Machines(harness)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(range(SAMPLES // 2), "has 50 samples instead of 100", id="half of the data"),
        pytest.param([], "has 0 samples instead of 100", id="an empty folder"),
        pytest.param(
            reversed(range(SAMPLES)), "16 of 16 compared samples differ", id="another order"
        ),
    ],
)
@pytest.mark.ci
def test_a_late_machine_with_other_data_is_quarantined_and_the_job_goes_on(
    machines: Machines, data: Iterable[int], why: str
) -> None:
    harness, training = machines.harness, machines.training
    first = machines.start(1, range(SAMPLES))
    training.await_samples(1)

    # When another one starts, with other data, and tries before the first one ends the job
    training.worker(first).freeze()
    late = machines.start(2, data)

    # Then it leaves, and an event names it and says what differs
    assert training.worker(late).wait() == 0
    (event,) = await_truth(lambda: harness.events(training.job, "worker-quarantined"))
    assert event["details"]["worker"] == late
    assert why in event["text"]
    assert why in harness.jobs.workers.quarantined(training.job)[late]

    training.worker(first).thaw()
    training.await_success()
    assert training.unexplained_repeats() == 0


def test_a_job_fails_if_its_first_machine_is_the_wrong_one(harness: Harness) -> None:
    # Given a job that began on a machine with half of the data, and doesn't end soon
    machines = Machines(harness, epochs=1000)
    job = machines.training.job
    machines.start(1, range(SAMPLES // 2))
    machines.training.await_samples(1)

    for number in (2, 3, 4):
        machines.start(number, range(SAMPLES))

    await_truth(lambda: harness.jobs.get(job).state is JobState.FAILED)
    reason = harness.jobs.get(job).reason
    assert reason.startswith("3 of the job's machines are at fault, 1 are not; the last: task: ")


@pytest.mark.ci
def test_a_first_machine_without_data_does_not_fail_the_job(machines: Machines) -> None:
    # Given a machine with an empty folder, which is the first one
    harness, job = machines.harness, machines.training.job
    late = machines.folder(1).with_suffix(".late")
    late.touch()
    empty = machines.start(1, [])
    await_truth(lambda: harness.jobs.workers.names(job) == {empty})

    # When others have the data, and start before it has tried three times
    machines.start(2, range(SAMPLES))
    machines.start(3, range(SAMPLES))
    await_truth(lambda: len(harness.jobs.workers.names(job) - {empty}) == 2)
    late.unlink()
    await_truth(lambda: harness.jobs.failures(job))

    # Then they train, and the first one gets no work
    machines.training.await_samples(1)
    assert machines.training.worker(empty).wait() == 0
    machines.training.await_success()
