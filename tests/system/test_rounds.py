"""Rounds on real servers and processes: kills cost at most a moment, and no sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.harness import Harness
from support.training import Training

Eventually = Callable[..., Any]
ROUNDS = {"rule": "rounds"}


def start(harness: Harness, workers: int, push_every: int | None = 4) -> tuple[Training, list[str]]:
    training = Training(harness, samples=600, push_every=push_every, update=ROUNDS)
    return training, training.start(workers)


def members(harness: Harness, job: str) -> int:
    """Return the number of workers in the last round."""
    return harness.snapshots(job).read().meta.round.workers


def one_round_late(harness: Harness, job: str) -> int:
    """Return the number of updates whose base lacked the round of two workers before them."""
    return harness.snapshots(job).read().meta.totals.staleness.get("2", 0)


def test_workers_train_from_the_same_version(harness: Harness, eventually: Eventually) -> None:
    training, _ = start(harness, 3)

    def share_the_batch() -> bool:
        facts = harness.snapshots(training.job).read().meta.round
        return bool(facts.workers == 3 and facts.batch == pytest.approx(5, abs=1.5))

    eventually(share_the_batch)

    training.await_end()
    totals = harness.snapshots(training.job).read().meta.totals
    assert totals.staleness_mean < 1


def test_exchanges_are_measured_if_a_subtask_is_one_interval(
    harness: Harness, eventually: Eventually
) -> None:
    training = Training(
        harness, samples=600, subtasks=60, push_every=8, step_seconds=0.01, update=ROUNDS
    )
    training.start(2)

    eventually(lambda: harness.snapshots(training.job).read().meta.round.exchange_seconds > 0)

    training.await_end()


@pytest.mark.parametrize("killed", ["worker", "parameter-server"])
@pytest.mark.parametrize("push_every", [4, None], ids=["waiting", "overlapping"])
def test_a_kill_loses_nothing(
    harness: Harness, eventually: Eventually, killed: str, push_every: int | None
) -> None:
    training, names = start(harness, 2, push_every)
    eventually(lambda: members(harness, training.job) == 2)
    if push_every is None:
        eventually(lambda: one_round_late(harness, training.job) > 10)

    if killed == "worker":
        training.worker(names[0]).kill()
        eventually(lambda: members(harness, training.job) == 1)
    else:
        harness.servers[0].kill()
        harness.start_server()
        training.await_more_samples()

    training.await_end()
    assert harness.snapshots(training.job).read().meta.totals.rejected == {}
