"""Events about what the heartbeats of a job's workers show."""

from __future__ import annotations

from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.joined_machines import PREFIX, JoinedMachines
from vcasgd.store.ledger.worker_beats import WorkerBeats
from vcasgd.worker_names import machine_of

#: Seconds for one update below which no link is called slow, however short the training is.
MIN_SECONDS = 10.0
#: Most events of a job: names of workers are many in a long one.
MAX_EVENTS = 100


class WorkerEvents:
    """Names optimizers that aren't corrected, and links of machines that joined which are too slow
    for the updates.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, job: str, jobs: Jobs, beats: WorkerBeats, machines: JoinedMachines) -> None:
        self._job = job
        self._jobs = jobs
        self._beats = beats
        self._machines = machines
        self._judged: set[str] = set()
        self._slow = 0
        self._uncorrected = False

    def step(self) -> None:
        """Judge the links of the workers that have sent a first update, and name an optimizer."""
        for worker, beat in self._beats.of(self._job).items():
            if beat.uncorrected and not self._uncorrected:
                self._name_optimizer(beat.uncorrected)
            if worker in self._judged or not machine_of(worker).startswith(PREFIX):
                continue
            if not beat.pushes or not beat.local_steps or beat.step_seconds is None:
                continue
            machine = self._machines.get(machine_of(worker))
            if machine is not None and machine.upload_mbps and self._slow < MAX_EVENTS:
                self._judge(worker, beat, machine.upload_mbps)
            self._judged.add(worker)

    def _name_optimizer(self, name: str) -> None:
        self._uncorrected = True
        self._jobs.announce(
            self._job,
            "optimizer-uncorrected",
            "optimizer-uncorrected",
            f"{name} has moments of a worker's part of the batch, not of the whole "
            "batch, so several workers may train otherwise than one; only SGD, Adam, and AdamW of "
            "torch.optim are corrected, and their subclasses without a step of their own",
            optimizer=name,
        )

    def _judge(self, worker: str, beat: Heartbeat, mbps: float) -> None:
        size = (beat.pushed_bytes or 0) / (beat.pushes or 1)
        sends = size * 8e-6 / mbps
        trains = (beat.local_steps or 0) * (beat.step_seconds or 0.0)
        if sends <= max(trains, MIN_SECONDS):
            return
        self._slow += 1
        self._jobs.announce(
            self._job,
            f"slow link of {worker}",
            "slow-link",
            f"{worker} needs {sends:.0f} s to send an update of {size / 1e6:.3g} MB over its link "
            f"of {mbps:.3g} Mbit/s, and {trains:.3g} s to train for it; choose a smaller "
            "update.codec, or a longer push_every",
            worker=worker,
            upload_mbps=mbps,
            update_bytes=size,
            seconds=sends,
        )
