"""What the parts of one worker share: its connections, the leases in hand, how far it is."""

from __future__ import annotations

import threading
import time

from vcasgd.learning.shards import Cut
from vcasgd.settings import Settings
from vcasgd.spec.tuning import Tuning
from vcasgd.store.acl import lease_pass
from vcasgd.store.connection import connect
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.leases import Lease, Leases, WorkKind
from vcasgd.store.ledger.tuning import Tunings
from vcasgd.worker.heartbeat import HeldLeases
from vcasgd.worker.links import Links

#: pause while there is nothing to do, or something is not there yet
IDLE_SECONDS = 0.2


class WorkInterrupted(Exception):
    """The present piece of work ends early; what becomes of its lease is arranged already."""


class WorkerContext:
    """Owned by the training thread; the heartbeat reads the plain numbers."""

    def __init__(self, settings: Settings, job: str, name: str) -> None:
        self.settings = settings
        self.job = job
        self.name = name
        ledger = connect(settings.secret("ledger_url"))
        #: the tensors servers of all store nodes
        self.nodes = [connect(url, waits=False) for url in settings.tensors_urls()]
        self.jobs = Jobs(ledger)
        key = settings.worker_key
        own_pass = lease_pass(key.get_secret_value()) if key else ""
        self.leases = Leases(ledger, job, name, settings.lease_seconds, own_pass)
        self.links = self._links_to(Cut(0, 0, 0))
        self._tunings = Tunings(ledger, job)
        #: which of what is found by measuring it follows
        self.tuning = Tuning()
        #: of the push interval
        self.share = 1.0
        #: momentum that asynchrony adds
        self.asynchrony = 0.0
        self.held = HeldLeases()
        #: pieces in hand that have to be taken up again, from where they stand then
        self.again: dict[str, Lease] = {}
        self.current: Lease | None = None
        self.leaving = threading.Event()
        self.doing = "starting"
        self.steps = 0
        self.samples = 0
        #: of the last intervals, and in the last one
        self.step_seconds: float | None = None
        self.local_steps: int | None = None
        self.momentum: float | None = None
        #: since when something is trained that is not on its way yet (Unix seconds)
        self.unpushed_since: float | None = None
        #: pieces in a row that the user's code failed
        self.failures = 0
        self._progress_at = time.monotonic()

    # -- shards --------------------------------------------------------------------------------

    def open_links(self, cut: Cut) -> None:
        """To all shards of the job, once it is known how many there are.

        Raises :class:`~vcasgd.errors.StoreUnavailable` where not all store nodes are named.
        """
        if not self.links.known:
            self.links = self._links_to(cut)

    def _links_to(self, cut: Cut) -> Links:
        key = self.settings.worker_key
        return Links(
            self.nodes,
            self.job,
            cut,
            self.settings.patience_seconds,
            key.get_secret_value() if key else None,
        )

    # -- progress ------------------------------------------------------------------------------

    def on_step(self) -> None:
        self.steps += 1
        self.note_progress()

    def note_progress(self) -> None:
        """The user's code is not hanging: it made a step, or it isn't its turn."""
        self._progress_at = time.monotonic()

    def makes_progress(self) -> bool:
        return time.monotonic() - self._progress_at < self.settings.stall_seconds

    def pause(self, seconds: float = IDLE_SECONDS) -> None:
        self.note_progress()
        self.leaving.wait(seconds)

    # -- tuning --------------------------------------------------------------------------------

    def hear_tuning(self) -> None:
        """What the controller found meanwhile. Raises
        :class:`~vcasgd.errors.StoreUnavailable`; then all stays as it was."""
        if not self.tuning.of_workers:
            return
        found = self._tunings.read()
        if self.tuning.local_steps:
            self.share = found.shares.get(self.name, 1.0)
        if self.tuning.momentum:
            self.asynchrony = found.implicit_momentum

    # -- leases --------------------------------------------------------------------------------

    def may_go_on(self, lease: Lease) -> bool:
        return self.held.has(lease) and not self.leaving.is_set()

    def finish(self, lease: Lease) -> None:
        self.held.drop(lease.piece)

    def postpone_current(self) -> None:
        """A server is away: the piece is taken up again later."""
        if self.current is not None:
            self.again[self.current.piece] = self.current
            self.current = None

    def drop_current(self) -> None:
        """The lease is no longer ours, or was given back."""
        if self.current is None:
            return
        self.held.drop(self.current.piece)
        if self.current.kind is WorkKind.TRAIN:
            self.links.forget(self.current.number)
        self.current = None

    def release_unfinished(self) -> None:
        """Gives back what is not done. Raises :class:`~vcasgd.errors.StoreUnavailable`."""
        for lease in (self.current, *self.again.values()):
            if lease is not None and self.held.has(lease):
                self.leases.release(lease)
                self.held.drop(lease.piece)
