"""Events about what the heartbeats of a job's workers show."""

from __future__ import annotations

from vcasgd.store.ledger.heartbeats import Heartbeat
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.worker_beats import WorkerBeats

#: Seconds of a push below which no link is called slow, however short the training is.
MIN_SECONDS = 10.0
#: Most events of a job: names of workers are many in a long one.
MAX_EVENTS = 100


class WorkerEvents:
    """Names optimizers that aren't corrected, and links that are too slow for the updates.

    Calls raise :class:`~vcasgd.errors.StoreUnavailable` and can be repeated.
    """

    def __init__(self, job: str, jobs: Jobs, beats: WorkerBeats) -> None:
        self._job = job
        self._jobs = jobs
        self._beats = beats
        #: Pushes of a worker when one of them was slow; an outage delays only one.
        self._slow: dict[str, int] = {}
        self._named: set[str] = set()
        self._uncorrected = False

    def step(self) -> None:
        """Judge the links of the workers that have pushed, and name an optimizer."""
        for worker, beat in self._beats.of(self._job).items():
            if beat.uncorrected and not self._uncorrected:
                self._name_optimizer(beat.uncorrected)
            if worker not in self._named and len(self._named) < MAX_EVENTS:
                self._judge(worker, beat)

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

    def _judge(self, worker: str, beat: Heartbeat) -> None:
        sends = beat.push_seconds or 0.0
        trains = (beat.local_steps or 0) * (beat.step_seconds or 0.0)
        pushes = beat.pushes or 0
        if not trains or not pushes or sends <= max(trains, MIN_SECONDS):
            return
        if self._slow.setdefault(worker, pushes) == pushes:
            return
        self._named.add(worker)
        size = (beat.pushed_bytes or 0) / pushes
        self._jobs.announce(
            self._job,
            f"slow link of {worker}",
            "slow-link",
            f"{worker} needs {sends:.0f} s to push an update of {size / 1e6:.3g} MB, and "
            f"{trains:.3g} s to train for it; choose a smaller update.codec, or a longer "
            "push_every",
            worker=worker,
            update_bytes=size,
            seconds=sends,
        )
