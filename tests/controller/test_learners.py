"""Number of learners on a machine: which workers start and stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.fleet_records import PACKAGE, job_spec, machine

from vcasgd.controller.fleet.learners import MEASURE_BEATS, MEASURE_STEPS, REST_BEATS, Learners
from vcasgd.fleet.observed import JobDemand, ObservationTimes, Observed, WorkerView
from vcasgd.fleet.plan import StartWorker, StopWorker
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Leases
from vcasgd.store.ledger.tuning import Tunings
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.worker_names import job_of, learner_of, machine_of, worker_name

BEAT = 1.0
GIB = 2**30
MACHINE = "local-0a1b"


class TunedMachine:
    """One job on one machine, with simulated workers."""

    def __init__(self, ledger: RedisClient, most: int) -> None:
        self.ledger, self.most = ledger, most
        self.jobs = Jobs(ledger)
        self.job = self.jobs.submit(job_spec(), PACKAGE).id
        self.now = 1000.0
        self.learners = Learners(ledger, WorkerBeats(ledger), BEAT)
        #: Further workers as Ray lists them, and whether each is alive.
        self.further: dict[str, bool] = {}
        self.first_alive = True
        self.gpus: dict[str, int] = {}
        self.steps: dict[str, int] = {}
        self.pids: dict[str, int] = {}

    def name(self, learner: int = 1) -> str:
        return worker_name(MACHINE, self.job, learner)

    def send_heartbeat(self, learner: int, steps: int, **more: Any) -> None:
        """Send a worker's heartbeat, ``steps`` after the previous one."""
        name = self.name(learner)
        self.steps[name] = self.steps.get(name, 1) + steps
        fields = {
            "at": self.now,
            "pid": self.pids.get(name, learner),
            "steps": self.steps[name],
            "memory_bytes": 16 * GIB,
            "memory_free_bytes": 8 * GIB,
            "resident_bytes": 1 * GIB,
            "cores": 8,
            **more,
        }
        Leases(self.ledger, self.job, name, 60).renew(fields, [])

    def decide(self) -> list[StartWorker | StopWorker]:
        """Run one round. Its actions take effect before the next one."""
        state = Observed(
            ledger="c",
            machines=(machine(MACHINE),),
            nodes=frozenset([MACHINE]),
            workers=(WorkerView(self.name(), self.job, MACHINE, alive=self.first_alive),),
            jobs=(
                JobDemand(self.job, 1, 1, ("local",), wants=1, running=True, learners=self.most),
            ),
            pools=(),
            history=ObservationTimes(since=0.0),
            gpus=self.gpus,
        )
        stops, starts = self.learners.decide(state, self.further, self.now)
        actions = [*stops, *starts]
        for action in actions:
            if isinstance(action, StartWorker):
                self.further[worker_name(action.machine_id, action.job, action.learner)] = True
            else:
                self.further[action.name] = False
        return actions

    def work(self, rate: float, **more: Any) -> list[StartWorker | StopWorker]:
        """Let all learners train for one measurement, at ``rate`` steps per second together."""
        numbers = [1, *(learner_of(name) for name, alive in self.further.items() if alive)]
        for number in numbers:
            self.send_heartbeat(number, 1, **more)
        actions = self.decide()
        self.now += MEASURE_BEATS * BEAT
        for number in numbers:
            self.send_heartbeat(number, round(rate * MEASURE_BEATS * BEAT / len(numbers)), **more)
        return actions + self.decide()

    def count(self) -> int:
        return 1 + sum(self.further.values())

    def events(self) -> list[str]:
        events = self.jobs.events(self.job)
        return [each["text"] for each in events if each["kind"] == "tuned-learners"]


@pytest.fixture
def tuned(ledger: RedisClient) -> Callable[..., TunedMachine]:
    return lambda most=4: TunedMachine(ledger, most)


def test_name_contains_job_machine_and_learner() -> None:
    first, third = worker_name("gcp-1-a", "job-x"), worker_name("gcp-1-a", "job-x", 3)

    assert (first, third) == ("job-x.gcp-1-a", "job-x.gcp-1-a_3")
    assert {job_of(first), job_of(third)} == {"job-x"}
    assert {machine_of(first), machine_of(third)} == {"gcp-1-a"}
    assert (learner_of(first), learner_of(third)) == (1, 3)
    assert learner_of("worker-1") == learner_of("a.b_c") == 1


def test_each_gpu_gets_a_learner(tuned: Callable[..., TunedMachine]) -> None:
    """Given a job without tuned learners on a machine with four GPUs, four learners run."""
    one = tuned(1)
    assert one.decide() == []
    one.gpus = {one.name(): 4}
    assert one.decide() == [StartWorker(MACHINE, one.job, number) for number in (2, 3, 4)]
    # It stays so, whatever they gain.
    assert one.work(10) == one.work(11) == []
    assert one.count() == 4
    assert one.events() == [f"{MACHINE} runs 4 learners instead of 1; it has 4 GPUs"]


def test_learner_of_a_gpu_that_crashed_comes_back_later(tuned: Callable[..., TunedMachine]) -> None:
    one = tuned(1)
    one.gpus = {one.name(): 2}
    one.decide()
    one.work(10)
    one.further[one.name(2)] = False
    assert one.decide() == []
    one.now += REST_BEATS * BEAT
    assert one.decide() == [StartWorker(MACHINE, one.job, 2)]


def test_learners_start_while_they_help_and_the_last_one_stops(
    tuned: Callable[..., TunedMachine],
) -> None:
    one = tuned()

    # A second and a third learner help; a fourth does not.
    assert one.work(10) == [StartWorker(MACHINE, one.job, 2)]
    assert one.work(19) == [StartWorker(MACHINE, one.job, 3)]
    assert one.work(24) == [StartWorker(MACHINE, one.job, 4)]
    assert one.work(26) == [StopWorker(one.name(4), "surplus learner")]

    assert Tunings(one.ledger, one.job).read().learners == {MACHINE: 3}
    assert one.events()[-1].startswith(
        f"{MACHINE} runs 3 learners instead of 4; local steps per second: 24.0 with 3, 26.0 with 4"
    )
    # The fourth is tried again, but only later.
    assert one.work(24) == []
    one.now += REST_BEATS * BEAT
    assert one.work(24) == [StartWorker(MACHINE, one.job, 4)]
    assert len(one.events()) == 5


def test_measurement_starts_when_all_learners_train(tuned: Callable[..., TunedMachine]) -> None:
    one = tuned()
    one.work(10)

    # The second one has sent no heartbeat yet.
    for _ in range(3):
        one.now += MEASURE_BEATS * BEAT
        one.send_heartbeat(1, 1000)
        assert one.decide() == []
    # Its first heartbeat starts the measurement, which needs more steps than these.
    one.send_heartbeat(2, 1)
    one.decide()
    one.now += MEASURE_BEATS * BEAT
    one.send_heartbeat(2, MEASURE_STEPS // 4)
    one.send_heartbeat(1, MEASURE_STEPS // 4)
    assert one.decide() == []
    # A replaced process starts the measurement again.
    one.pids[one.name(2)] = 99
    one.steps[one.name(2)] = 1
    one.send_heartbeat(2, MEASURE_STEPS)
    assert one.decide() == []


@pytest.mark.parametrize(
    "short",
    [
        {"memory_free_bytes": 2 * GIB},
        {"cores": 1},
        {"gpu_memory_bytes": 10 * GIB, "gpu_memory_free_bytes": 5 * GIB},
        {"memory_free_bytes": None},
        {"memory_free_bytes": "plenty"},
    ],
)
def test_no_learner_starts_that_does_not_fit(
    tuned: Callable[..., TunedMachine], short: dict[str, Any]
) -> None:
    assert tuned().work(10, **short) == []


def test_learner_stops_when_memory_is_short(tuned: Callable[..., TunedMachine]) -> None:
    one = tuned()
    one.work(10)

    assert one.work(20, memory_free_bytes=1 * GIB) == [StopWorker(one.name(2), "surplus learner")]


def test_crashed_learner_is_not_started_again_for_a_while(
    tuned: Callable[..., TunedMachine],
) -> None:
    one = tuned()
    one.work(10)
    one.send_heartbeat(2, 1)
    one.decide()

    # When its process ends without a reason
    one.further[one.name(2)] = False
    assert one.decide() == []

    # Then the machine continues with one learner, no failure counts, and the heartbeat is gone
    assert one.events()[-1] == (
        f"{MACHINE} runs 1 learner instead of 2; the process of {one.name(2)} ended"
    )
    assert one.jobs.failures(one.job) == []
    assert list(one.jobs.workers.heartbeats(one.job)) == [one.name()]
    assert one.work(10) == []


def test_learner_that_left_with_a_reason_is_started_again(
    tuned: Callable[..., TunedMachine],
) -> None:
    one = tuned()
    one.work(10)
    one.send_heartbeat(2, 1, leaving="SIGTERM")
    one.decide()

    one.further[one.name(2)] = False

    assert one.decide() == [StartWorker(MACHINE, one.job, 2)]


def test_further_learners_stop_with_the_first_one(tuned: Callable[..., TunedMachine]) -> None:
    one = tuned()
    one.work(10)
    assert one.count() == 2

    one.jobs.workers.drain([(one.job, one.name())])
    assert one.decide() == [StopWorker(one.name(2), "surplus learner")]

    # Also if it is lost already.
    one.further[one.name(2)] = True
    one.jobs.workers.remove(one.job, one.name())
    one.first_alive = False
    assert one.decide() == [StopWorker(one.name(2), "surplus learner")]
    assert Tunings(one.ledger, one.job).read().learners == {}


def test_next_controller_continues_with_the_same_number(tuned: Callable[..., TunedMachine]) -> None:
    one = tuned()
    one.work(10)
    one.work(19)
    assert one.count() == 3

    one.learners = Learners(one.ledger, WorkerBeats(one.ledger), BEAT)

    assert one.decide() == []
    assert one.count() == 3
