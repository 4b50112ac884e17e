"""Number of learners on each machine.

The plan places one worker per machine. If the machine has several GPUs, or a job allows more
learners, further workers with their own names are started beside the first one. They stop with it
and receive the same notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vcasgd.fleet.observed import JobDemand, Observed
from vcasgd.fleet.plan import StartWorker, StopWorker
from vcasgd.learning.tuning import Load, Trial, fewer, next_trial, room_for
from vcasgd.logging import isolated
from vcasgd.store.connection import RedisClient
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.tuning import Tunings
from vcasgd.store.ledger.untrusted import Heartbeat
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.worker_names import job_of, learner_of, machine_of, worker_name

#: Heartbeats over which a number of learners is measured, once all of them train.
MEASURE_BEATS = 20
#: Local steps over which it is measured at least; one step more or less is 1 %.
MEASURE_STEPS = 100
#: Heartbeats after which a number of learners that did not help is tried again.
REST_BEATS = 600

Beats = Mapping[str, Heartbeat]


@dataclass
class _Measurement:
    """Start of a measurement: the processes on a machine, the time, and their local steps."""

    processes: frozenset[tuple[str, int | None]]
    at: float
    steps: int


class Learners:
    """Decides for all machines, once per round.

    Trials are in memory. A new controller continues with the number of learners in the ledger and
    measures again.
    """

    def __init__(self, ledger: RedisClient, beats: WorkerBeats, heartbeat: float) -> None:
        self._ledger = ledger
        self._jobs = Jobs(ledger)
        self._beats = beats
        self._heartbeat = heartbeat
        #: By the first worker of a machine.
        self._trials: dict[str, Trial] = {}
        self._measured: dict[str, _Measurement] = {}
        #: Further workers that were alive in the previous round.
        self._alive: set[str] = set()

    def decide(
        self, state: Observed, further: Mapping[str, bool], now: float
    ) -> tuple[list[StopWorker], list[StartWorker]]:
        """Return the further workers to stop and to start.

        ``further``: those that there are, and whether each is alive. Raises
        :class:`~vcasgd.errors.StoreUnavailable`.
        """
        alive = {name for name, is_alive in further.items() if is_alive}
        died, self._alive = self._alive - alive, alive
        on_gpus = {job_of(name) for name in state.gpus}
        tuned = [
            each
            for each in state.jobs
            if each.running and (each.learners > 1 or each.job in on_gpus)
        ]
        self._drop_other_jobs({each.job for each in tuned})
        target: set[str] = set()
        for demand in tuned:
            with isolated(demand.job):
                target.update(self._target(demand, state, alive, died, now))
        return [StopWorker(name, "surplus learner") for name in sorted(alive - target)], [
            StartWorker(machine_of(name), job_of(name), learner_of(name))
            for name in sorted(target - alive)
        ]

    def _target(
        self, demand: JobDemand, state: Observed, alive: set[str], died: set[str], now: float
    ) -> list[str]:
        """Return the further workers that a job should have."""
        job, beats = demand.job, self._beats.of(demand.job)
        tunings = Tunings(self._ledger, job)
        before = tunings.read().learners
        learners = {}
        for name in self._first(state, job):
            machine = machine_of(name)
            self._trials.setdefault(name, Trial(max(1, before.get(machine, 1))))
            gpus = state.gpus.get(name, 1)
            self._use_gpus(name, gpus, now)
            self._tune(name, max(demand.learners, gpus), gpus, beats, died, now)
            learners[machine] = self._trials[name].learners
        if learners != before:
            tunings.publish(learners=learners)
        for name in beats:
            if learner_of(name) > 1 and name not in alive:
                self._jobs.workers.remove(job, name)
        return [
            worker_name(machine, job, number)
            for machine, count in learners.items()
            for number in range(2, count + 1)
        ]

    def _first(self, state: Observed, job: str) -> list[str]:
        """Return the first workers of the machines that stay with a job."""
        leaving = self._jobs.workers.draining(job)
        staying = {one.id for one in state.staying()}
        return [
            worker.name
            for worker in state.workers
            if worker.job == job
            and worker.alive
            and worker.machine_id in staying
            and worker.name not in leaving
        ]

    def _drop_other_jobs(self, jobs: set[str]) -> None:
        """Drop the trials of machines that work for other jobs."""
        for name in [each for each in self._trials if job_of(each) not in jobs]:
            self._trials.pop(name, None)
            self._measured.pop(name, None)

    # -- one machine ---------------------------------------------------------------------------

    def _use_gpus(self, first: str, gpus: int, now: float) -> None:
        """Let a machine have a learner for each GPU, unless one of them crashed lately."""
        trial = self._trials[first]
        if trial.learners < gpus and now >= trial.closed_until:
            self._settle(first, Trial(gpus), f"it has {gpus} GPUs")

    def _tune(
        self, first: str, most: int, gpus: int, beats: Beats, died: set[str], now: float
    ) -> None:
        job, machine, trial = job_of(first), machine_of(first), self._trials[first]
        rest = REST_BEATS * self._heartbeat
        names = [worker_name(machine, job, each) for each in range(1, trial.learners + 1)]
        leaving = {name for name, beat in beats.items() if beat.leaving}
        crashed = [name for name in names if name in died - leaving]
        if crashed:
            # Most likely it ran out of memory, which must not fail the job.
            self._settle(first, fewer(trial, now, rest), f"the process of {crashed[0]} ended")
            return
        if not all(name in beats and beats[name].steps for name in names):
            return
        rate = self._rate(first, {name: beats[name] for name in names})
        if rate is not None:
            load = _load(rate, [beats[name] for name in names], gpus)
            rates = {**trial.rates, trial.learners: rate}
            text = ", ".join(f"{rates[each]:.1f} with {each}" for each in sorted(rates))
            after = next_trial(trial, load, most, now, rest)
            self._settle(first, after, f"local steps per second: {text}")

    def _settle(self, first: str, after: Trial, why: str) -> None:
        before = self._trials[first]
        self._trials[first] = after
        self._measured.pop(first, None)
        if after.learners == before.learners:
            return
        machine, plural = machine_of(first), "" if after.learners == 1 else "s"
        self._jobs.event(
            job_of(first),
            "tuned-learners",
            f"{machine} runs {after.learners} learner{plural} instead of {before.learners}; {why}",
            machine=machine,
            learners=after.learners,
            before=before.learners,
        )

    def _rate(self, first: str, beats: Beats) -> float | None:
        """Return the local steps per second of all learners of a machine.

        None until the measurement is long enough.
        """
        processes = frozenset((name, beat.pid) for name, beat in beats.items())
        steps = sum(beat.steps or 0 for beat in beats.values())
        # Each heartbeat has its own time; the mean of the times belongs to the sum of the steps.
        at = sum(beat.at or 0.0 for beat in beats.values()) / len(beats)
        start = self._measured.get(first)
        if start is None or start.processes != processes or steps < start.steps:
            self._measured[first] = _Measurement(processes, at, steps)
            return None
        seconds, count = at - start.at, steps - start.steps
        enough = seconds >= MEASURE_BEATS * self._heartbeat and count >= MEASURE_STEPS
        return count / seconds if enough else None


def _load(rate: float, beats: list[Heartbeat], gpus: int) -> Load:
    """Return the load of a machine as its learners report it; the lowest of differing reports.

    A machine whose learners report nothing gets no further one.
    """
    room = min(_room(beat, -(-len(beats) // gpus)) for beat in beats)
    return Load(rate, room, min(beat.cores or 1 for beat in beats))


def _room(beat: Heartbeat, learners: int) -> int:
    """Return how many more learners fit into the memory of the machine and of a GPU.

    ``learners``: those that share the GPU.
    """
    total, free, own = beat.memory_bytes, beat.memory_free_bytes, beat.resident_bytes
    if not (total and free and own):
        return 0
    room = room_for(free, total, own)
    on_gpu = beat.gpu_memory_bytes
    if on_gpu:
        # The memory of the GPU is not reported by process, so each learner counts the same.
        left = beat.gpu_memory_free_bytes or 0
        room = min(room, room_for(left, on_gpu, (on_gpu - left) / learners))
    return room
