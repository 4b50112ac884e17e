"""Several learners on one machine of a whole stack: Ray starts them, and they train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.counted_job import CountedJob, client_of

from vcasgd.client import Client
from vcasgd.settings import Settings

pytestmark = pytest.mark.extended

Eventually = Callable[..., Any]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """Client of a stack with a single machine."""
    with client_of(Settings(home=tmp_path / "home", api_port=0, local_capacity=1)) as client:
        yield client


def test_machine_with_a_mostly_waiting_learner_gets_a_second_one(
    client: Client, eventually: Eventually, tmp_path: Path
) -> None:
    # Given a job that waits in each local step, and that allows two learners
    job = CountedJob(
        client,
        tmp_path,
        1000,
        step_seconds=0.1,
        push_every=10,
        workers={"min": 1, "max": 1},
        tuning={"learners_per_machine": 2},
    ).id

    # When the first one has been measured
    eventually(lambda: 2 in client.job(job).tuned.learners.values())
    (machine,) = client.job(job).tuned.learners

    # Then a second one trains beside it, in its own process, on the same machine
    def training_workers() -> list[Any]:
        return [row for row in client.job(job).workers() if row.pushes]

    eventually(lambda: len(training_workers()) == 2)
    assert {row.machine for row in training_workers()} == {machine}
    assert len({row.pid for row in training_workers()}) == 2
    assert sorted(row.name for row in training_workers()) == [
        f"{job}.{machine}",
        f"{job}.{machine}_2",
    ]
    event = next(each for each in client.job(job).events() if each.kind == "tuned-learners")
    assert event.text.startswith(
        f"{machine} runs 2 learners instead of 1; local steps per second: "
    )

    # And it ends with the job, which has lost no machine and repeated no work
    client.job(job).cancel()
    eventually(lambda: all(row.leaving for row in client.job(job).workers()))
    view = client.job(job)
    assert (view.evictions, view.kills, view.progress.samples_repeated) == (0, 0, 0)
    assert not view.totals.rejected
