"""Settings that a job tunes while it runs take effect in real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.harness import Harness
from support.training import TASKS

from vcasgd.store.ledger.job import JobState
from vcasgd.store.ledger.untrusted import Heartbeat

Eventually = Callable[..., Any]

#: Measurements arrive with heartbeats.
pytestmark = pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["fast heartbeat"])


def submit(harness: Harness, task: str, args: dict[str, Any], **fields: Any) -> str:
    return harness.submit_audit(
        working_dir=TASKS, task=f"uneven:{task}", args=args, samples=400, **fields
    )


def start(harness: Harness, job: str, workers: int, eventually: Eventually) -> None:
    harness.start_server()
    harness.start_job_loop()
    harness.start_workers(job, workers)
    eventually(lambda: harness.jobs.get(job).state is JobState.RUNNING)


@pytest.mark.ci
def test_a_slow_worker_makes_fewer_local_steps_than_its_peer(
    harness: Harness, eventually: Eventually
) -> None:
    # Given two workers; one takes about five times as long for a step
    slow = harness.home / "slow"
    job = submit(
        harness,
        "Uneven",
        {"slow": str(slow), "slow_seconds": 0.16},
        epochs=400,
        subtasks=2,
        push_every=10,
        step_seconds=0.04,
        tuning={"local_steps": True},
    )
    start(harness, job, 2, eventually)

    def beats() -> dict[bool, Heartbeat]:
        """Return the heartbeats, with True as the slow worker's key."""
        pid = int(slow.read_text() or 0)
        return {beat.pid == pid: beat for beat in harness.jobs.workers.heartbeats(job).values()}

    # When both are measured
    eventually(lambda: harness.events(job, "tuned-local-steps"))

    # Then the slow one pushes after fewer steps, in proportion to its speed
    eventually(lambda: (beats()[True].local_steps or 10) < 10)

    def target() -> int:
        return round(10 * min(harness.jobs.get(job).tuned.shares.values()))

    eventually(lambda: beats()[True].local_steps == target() < 10)
    assert beats()[False].local_steps == 10
    assert (beats()[True].step_seconds or 0) > (beats()[False].step_seconds or 0)

    # and both push about as often
    before = {name: beat.pushes or 0 for name, beat in beats().items()}
    eventually(lambda: (beats()[False].pushes or 0) > before[False] + 6)
    assert (beats()[True].pushes or 0) > before[True] + 1


def test_momentum_is_lowered_as_asynchrony_adds_its_own(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a job whose optimizer has momentum 0.9
    trace = harness.home / "trace"
    job = submit(
        harness,
        "Rolling",
        {"trace": str(trace)},
        epochs=400,
        subtasks=4,
        push_every=2,
        step_seconds=0.005,
        tuning={"momentum": True},
    )

    # When three workers push asynchronously
    start(harness, job, 3, eventually)
    (event, *_) = eventually(lambda: harness.events(job, "tuned-momentum"))

    # Then their optimizers' momentum is lowered by the implicit momentum of the staleness
    adds = event["details"]["implicit_momentum"]
    assert adds == 1 - 1 / (1 + event["details"]["staleness_mean"])
    assert adds > 0.3
    steps = trace.read_text().split()
    assert float(steps[0]) == 0.9

    def followed() -> bool:
        left = 0.9 - harness.jobs.get(job).tuned.implicit_momentum
        last = float(trace.read_text().split()[-1])
        return abs(last - max(left, 0.001)) < 1e-9

    eventually(followed)
    point = eventually(lambda: harness.jobs.metrics(job))[-1]
    assert point["implicit_momentum"] == 1 - 1 / (1 + point["staleness_mean"])


def test_updates_lose_weight_while_validation_worsens_despite_a_restart(
    harness: Harness, eventually: Eventually
) -> None:
    # Given a job whose accuracy falls with each epoch
    job = submit(
        harness,
        "Worsening",
        {},
        epochs=400,
        subtasks=4,
        push_every="subtask",
        step_seconds=0.002,
        max_epoch_lead=0,
        tuning={"mixing": True},
    )

    def factor() -> float:
        points = harness.jobs.metrics(job)
        return float(points[-1]["mixing_factor"]) if points else 1.0

    # When several epochs have been evaluated
    start(harness, job, 1, eventually)
    (event, *_) = eventually(lambda: harness.events(job, "tuned-mixing"))

    # Then updates have a lower weight
    assert event["details"]["factor"] <= 0.5
    assert event["text"].startswith("validation worsened in epoch ")
    eventually(lambda: factor() <= 0.5)
    eventually(lambda: not torch.equal(harness.vector(job), harness.vector(job).round()))

    # and the next parameter server keeps it
    low = harness.jobs.get(job).tuned.mixing
    harness.server.kill()
    before = len(harness.jobs.metrics(job))
    harness.start_server()
    eventually(lambda: len(harness.jobs.metrics(job)) > before)
    assert all(point["mixing_factor"] <= low for point in harness.jobs.metrics(job)[before:])
