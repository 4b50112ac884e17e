"""How many learners each machine carries for its job.

The plan places one worker on each machine, and knows of no other. Where a job allows more
learners, further workers are started beside that first one, under names of their own; they come
and go with it, and hear notices as it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vcasgd.controller.fleet.names import instance_of, job_of, learner_of, worker_name
from vcasgd.fleet.observed import JobDemand, Observed
from vcasgd.fleet.plan import StartWorker, StopWorker
from vcasgd.learning.tuning import Load, Trial, fewer, next_trial, room_for
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.tuning import Tunings

#: a number of learners is measured for so many heartbeats, from when all of them train
MEASURE_BEATS = 20
#: and over so many local steps: one more or less is 1 %
MEASURE_STEPS = 100
#: what did not help is tried again after so many heartbeats
REST_BEATS = 600

Beats = Mapping[str, Heartbeat]


@dataclass
class _Measurement:
    """Since when the same processes train on a machine, and how far they were then."""

    processes: frozenset[tuple[str, int | None]]
    at: float
    steps: int


class Learners:
    """Of all machines, one round at a time. Trials are in memory: a new controller goes on with
    as many learners as the ledger says, and measures anew."""

    def __init__(self, ledger: RedisClient, heartbeat: float) -> None:
        self._ledger = ledger
        self._jobs = Jobs(ledger)
        self._heartbeat = heartbeat
        #: by the first worker of a machine
        self._trials: dict[str, Trial] = {}
        self._measured: dict[str, _Measurement] = {}
        #: further workers that were alive at the last look
        self._alive: set[str] = set()

    def look(
        self, state: Observed, further: Mapping[str, bool], now: float
    ) -> list[StartWorker | StopWorker]:
        """What to do about further workers. ``further``: those that Ray lists, and whether each
        is alive. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        alive = {name for name, there in further.items() if there}
        died, self._alive = self._alive - alive, alive
        tuned = [each for each in state.jobs if each.learners > 1 and each.running]
        self._forget_machines({each.job for each in tuned})
        wanted = {
            name for demand in tuned for name in self._wanted(demand, state, alive, died, now)
        }
        return [
            *(StopWorker(name, "not wanted on its machine") for name in sorted(alive - wanted)),
            *(
                StartWorker(instance_of(name), job_of(name), learner_of(name))
                for name in sorted(wanted - alive)
            ),
        ]

    def _wanted(
        self, demand: JobDemand, state: Observed, alive: set[str], died: set[str], now: float
    ) -> list[str]:
        """The further workers that a job is to have."""
        job, beats = demand.job, self._jobs.workers(demand.job)
        tunings = Tunings(self._ledger, job)
        before = tunings.read().learners
        learners = {}
        for name in self._first(state, job):
            machine = instance_of(name)
            self._trials.setdefault(name, Trial(max(1, before.get(machine, 1))))
            self._consider(name, demand.learners, beats, died, now)
            learners[machine] = self._trials[name].learners
        if learners != before:
            tunings.publish(learners=learners)
        for name in beats:
            if learner_of(name) > 1 and name not in alive:
                self._jobs.remove_worker(job, name)
        return [
            worker_name(machine, job, number)
            for machine, count in learners.items()
            for number in range(2, count + 1)
        ]

    def _first(self, state: Observed, job: str) -> list[str]:
        """The first workers of the machines that go on with a job."""
        leaving = self._jobs.draining(job)
        staying = {one.id for one in state.staying()}
        found = [
            worker.name
            for worker in state.workers
            if worker.job == job and worker.alive and worker.instance_id in staying
        ]
        return [name for name in found if name not in leaving]

    def _forget_machines(self, jobs: set[str]) -> None:
        """Of other jobs."""
        for name in [each for each in self._trials if job_of(each) not in jobs]:
            self._forget(name)

    def _forget(self, first: str) -> None:
        self._trials.pop(first, None)
        self._measured.pop(first, None)

    # -- one machine ---------------------------------------------------------------------------

    def _consider(self, first: str, most: int, beats: Beats, died: set[str], now: float) -> None:
        job, machine, trial = job_of(first), instance_of(first), self._trials[first]
        rest = REST_BEATS * self._heartbeat
        names = [worker_name(machine, job, each) for each in range(1, trial.learners + 1)]
        crashed = [name for name in names if name in died and not _says_why(beats, name)]
        if crashed:
            # most likely for want of memory, which must not fail the job
            self._settle(first, fewer(trial, now, rest), f"the process of {crashed[0]} ended")
            return
        if not all(name in beats and beats[name].steps for name in names):
            return
        rate = self._rate(first, {name: beats[name] for name in names})
        if rate is not None:
            load = _load(rate, [beats[name] for name in names])
            rates = {**trial.rates, trial.learners: rate}
            told = ", ".join(f"{rates[each]:.1f} with {each}" for each in sorted(rates))
            after = next_trial(trial, load, most, now, rest)
            self._settle(first, after, f"local steps a second: {told}")

    def _settle(self, first: str, after: Trial, why: str) -> None:
        before = self._trials[first]
        self._trials[first] = after
        self._measured.pop(first, None)
        if after.learners == before.learners:
            return
        machine = instance_of(first)
        self._jobs.event(
            job_of(first),
            "tuned-learners",
            f"{machine} carries {after.learners} instead of {before.learners}; {why}",
            instance=machine,
            learners=after.learners,
            before=before.learners,
        )

    def _rate(self, first: str, beats: Beats) -> float | None:
        """Local steps a second of these learners together, once it was measured for long
        enough."""
        processes = frozenset((name, beat.pid) for name, beat in beats.items())
        steps = sum(beat.steps or 0 for beat in beats.values())
        # each beat has a time of its own; their mean is that of the sum
        at = sum(beat.at or 0.0 for beat in beats.values()) / len(beats)
        start = self._measured.get(first)
        if start is None or start.processes != processes or steps < start.steps:
            self._measured[first] = _Measurement(processes, at, steps)
            return None
        seconds, made = at - start.at, steps - start.steps
        enough = seconds >= MEASURE_BEATS * self._heartbeat and made >= MEASURE_STEPS
        return made / seconds if enough else None


def _load(rate: float, beats: list[Heartbeat]) -> Load:
    """As its learners say; of several the one with the least. A machine whose learners say
    nothing gets no further one."""
    room = min(_room(beat, len(beats)) for beat in beats)
    return Load(rate, room, min(beat.cores or 1 for beat in beats))


def _room(beat: Heartbeat, learners: int) -> int:
    """For so many more of them, in the machine's memory and its GPU's."""
    total, free, own = beat.memory_bytes, beat.memory_free_bytes, beat.resident_bytes
    if not (total and free and own):
        return 0
    room = room_for(free, total, own)
    on_gpu = beat.gpu_memory_bytes
    if on_gpu:
        # nothing says how much of it is whose
        left = beat.gpu_memory_free_bytes or 0
        room = min(room, room_for(left, on_gpu, (on_gpu - left) / learners))
    return room


def _says_why(beats: Beats, name: str) -> bool:
    """It leaves in good order, as far as its last words say."""
    return name in beats and bool(beats[name].leaving)
