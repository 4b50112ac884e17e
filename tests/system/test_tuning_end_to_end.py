"""Settings that a job tunes while it runs take effect in real processes."""

from __future__ import annotations

import pytest
from support.harness import Harness
from support.training import TASKS
from support.waiting import await_truth

from vcasgd.store.ledger.untrusted import Heartbeat


# Measurements arrive with heartbeats.
@pytest.mark.parametrize("harness", [0.25], indirect=True, ids=["fast heartbeat"])
@pytest.mark.ci
def test_a_slow_worker_makes_fewer_local_steps_than_its_peer(harness: Harness) -> None:
    # Given two workers; one takes about five times as long for a step
    slow = harness.home / "slow"
    job = harness.submit_audit(
        working_dir=TASKS,
        task="uneven:Uneven",
        args={"slow": str(slow), "slow_seconds": 0.16},
        samples=400,
        epochs=400,
        subtasks=2,
        push_every=10,
        step_seconds=0.04,
        tuning={"local_steps": True},
    )
    harness.start_server()
    harness.start_job_loop()
    harness.start_workers(job, 2)

    def beats() -> dict[bool, Heartbeat]:
        """Return the heartbeats, with True as the slow worker's key."""
        pid = int(slow.read_text() or 0)
        return {beat.pid == pid: beat for beat in harness.jobs.workers.heartbeats(job).values()}

    await_truth(lambda: harness.events(job, "tuned-local-steps"))

    # Then the slow one pushes after fewer steps, in proportion to its speed
    await_truth(lambda: (beats()[True].local_steps or 10) < 10)

    def target() -> int:
        return round(10 * min(harness.jobs.get(job).tuned.shares.values()))

    # A busy machine can make the other one slow for a moment.
    await_truth(
        lambda: beats()[True].local_steps == target() < 10 and beats()[False].local_steps == 10
    )
    await_truth(lambda: (beats()[True].step_seconds or 0) > (beats()[False].step_seconds or 0))

    # and both push about as often, unless the slow one had to wait for a processor
    def push_about_as_often() -> bool:
        before = {name: beat.pushes or 0 for name, beat in beats().items()}
        await_truth(lambda: (beats()[False].pushes or 0) > before[False] + 6)
        return (beats()[True].pushes or 0) > before[True] + 3

    await_truth(push_about_as_often)
