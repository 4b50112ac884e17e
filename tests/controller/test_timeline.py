"""Timelines of machines that the controller writes to the ledger."""

from __future__ import annotations

from dataclasses import replace

from vcasgd.controller.fleet.machine_timeline import TimelineRecorder
from vcasgd.fleet.observed import JobDemand, ObservationTimes, Observed, WorkerView
from vcasgd.fleet.providers.base import Machine, MachineState
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.events import EventLog
from vcasgd.worker_names import worker_name


def machine(name: str, state: MachineState = MachineState.RUNNING) -> Machine:
    return Machine(
        id=name, pool="local", state=state, launched_at=1.0, notice_at=None, host="",
        price_per_hour=0.5, spot=True, zone="z", machine_type="t",
    )  # fmt: skip


def observed(
    *machines: Machine, job: str | None = "A", nodes: str | None = "", paid: str = ""
) -> Observed:
    """An observation. ``nodes``: machines that work for the job; ``paid``: that it pays for."""
    names = (nodes or "").split()
    return Observed(
        cluster="test",
        machines=machines,
        nodes=None if nodes is None else frozenset(names),
        workers=tuple(WorkerView(worker_name(x, "A"), "A", x, alive=True) for x in names),
        jobs=(JobDemand(job, 0, 9, pools=("local",), wants=9, running=True),) if job else (),
        pools=(),
        history=ObservationTimes(since=0.0),
        payers=dict.fromkeys(paid.split(), "A"),
    )


def states(ledger: RedisClient, name: str) -> list[tuple[str, float, float | None]]:
    timeline = EventLog(ledger).timelines("A")[name]
    return [(span["state"], span["from"], span["to"]) for span in timeline["spans"]]


def test_timeline_starts_when_a_job_pays_for_the_machine(ledger: RedisClient) -> None:
    timeline = TimelineRecorder(ledger)
    timeline.record(observed(machine("i", MachineState.BOOTING), paid="i"), {}, 2.0)
    timeline.record(observed(machine("i"), paid="i"), {}, 3.0)
    timeline.record(observed(machine("i"), nodes="i", paid="i"), {}, 4.0)
    timeline.record(observed(machine("i", MachineState.LEAVING), nodes="i"), {}, 5.0)
    timeline.record(observed(), {"i": None}, 6.0)

    assert states(ledger, "i") == [
        ("booting", 1.0, 4.0), ("running", 4.0, 5.0), ("notice", 5.0, 6.0), ("dead", 6.0, None),
    ]  # fmt: skip


def test_machine_of_a_draining_worker_drains(ledger: RedisClient) -> None:
    timeline = TimelineRecorder(ledger)
    timeline.record(observed(machine("i"), nodes="i"), {}, 2.0)
    leaving = {worker_name("i", "A"): None}
    timeline.record(replace(observed(machine("i"), nodes="i"), draining=leaving), {}, 3.0)
    timeline.record(observed(), {"i": "idle"}, 4.0)

    assert [state for state, _, _ in states(ledger, "i")] == [
        "booting", "running", "draining", "dead",
    ]  # fmt: skip
    assert EventLog(ledger).timelines("A")["i"]["reason"] == "idle"


def test_next_controller_continues_the_timelines(ledger: RedisClient) -> None:
    TimelineRecorder(ledger).record(observed(machine("i"), nodes="i"), {}, 2.0)
    second = TimelineRecorder(ledger)
    second.record(observed(machine("i"), nodes=None, paid="i"), {}, 3.0)
    second.record(observed(), {"i": None}, 4.0)

    assert states(ledger, "i") == [
        ("booting", 1.0, 2.0), ("running", 2.0, 4.0), ("dead", 4.0, None),
    ]  # fmt: skip


def test_timelines_of_an_ended_job_end_with_it(ledger: RedisClient) -> None:
    timeline = TimelineRecorder(ledger)
    timeline.record(observed(machine("i"), nodes="i"), {}, 2.0)
    timeline.record(observed(machine("i"), job=None), {}, 3.0)
    timeline.record(observed(machine("i"), job=None), {}, 9.0)

    assert states(ledger, "i")[-1] == ("running", 2.0, 3.0)


def test_unchanged_timelines_are_not_written(ledger: RedisClient) -> None:
    timeline = TimelineRecorder(ledger)
    timeline.record(observed(machine("i"), nodes="i"), {}, 2.0)
    EventLog(ledger).update_timelines({}, {"A": ["i"]})
    timeline.record(observed(machine("i"), nodes="i"), {}, 3.0)

    assert EventLog(ledger).timelines("A") == {}
