"""The controller's process: the fleet loop and the job loop, under the controller's lease."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import NoReturn

from vcasgd.cluster.driver import Cluster
from vcasgd.controller import STACK_STOPS
from vcasgd.controller.fleet.act import hand_in
from vcasgd.controller.fleet.fleet import Fleet
from vcasgd.controller.fleet.loop import FleetLoop
from vcasgd.controller.fleet.pools import PoolRegistry
from vcasgd.controller.fleet.workplaces import PresentMachines, connect_ray
from vcasgd.controller.jobs.loop import JobLoop
from vcasgd.controller.leadership import Leadership
from vcasgd.controller.tracker_exports import TrackerExports
from vcasgd.controller.webhook import Webhook
from vcasgd.errors import (
    ClusterError,
    Fenced,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    VcasgdError,
)
from vcasgd.logging import configure_logging, exit_status
from vcasgd.settings import Settings, load_settings
from vcasgd.storage.objects import SIGNS, LifeSign, Storage
from vcasgd.store.connection import connect, patiently
from vcasgd.store.ledger.control import Control
from vcasgd.store.ledger.jobs import Jobs
from vcasgd.store.ledger.machines import JoinedMachines
from vcasgd.store.ledger.workers import WorkerBeats
from vcasgd.store.quotas import Watchdog

log = logging.getLogger(__name__)

#: Rounds in a row that fail unexpectedly until the process ends, and restarts with a new state.
MAX_FAILED_ROUNDS = 20


class Controller:
    """Runs the fleet loop in this thread and the job loop in another one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # Only for the lease: all else uses connections that carry it.
        self._unfenced = connect(settings.required("ledger_url"), over_limit=True)
        self._leadership = Leadership(Control(self._unfenced), settings)
        self._ledger = connect(
            settings.required("ledger_url"), over_limit=True, fence=self._leadership.fence
        )
        self._nodes = [
            connect(url, waits=False, over_limit=True) for url in settings.tensors_urls()
        ]
        self._control = Control(self._ledger)
        self._joined = JoinedMachines(self._ledger, settings.lease_seconds)
        self._beats = WorkerBeats(self._ledger)
        self._life_sign = LifeSign(
            Storage(settings.required("storage_url")), settings.orphan_seconds / SIGNS
        )
        self._stop = threading.Event()
        self._stack_stops = False
        self._reported = False

    def stop(self, *, stack: bool = False) -> None:
        """Make :meth:`run` return after the present round.

        With ``stack``, everything stops, so workers hand in what they have first.
        """
        self._stack_stops = self._stack_stops or stack
        self._stop.set()

    def run(self) -> None:
        """Run both loops until :meth:`stop`.

        Raises :class:`~vcasgd.errors.ClusterError` if Ray's head was lost, :class:`Fenced` if
        another controller took over, and :class:`~vcasgd.errors.SpecError` if the ledger belongs to
        another cluster.
        """
        patiently(
            lambda: Control(self._unfenced).claim(self._settings.cluster),
            self._settings.patience_seconds,
        )
        Watchdog(self._unfenced, "ledger").start()
        self._leadership.start()
        while not self._stop.is_set() and not self._leadership.sure:
            self._stop.wait(self._settings.heartbeat / 4)
        leads = lambda: self._leadership.sure  # noqa: E731
        jobs = JobLoop(self._settings, self._ledger, self._nodes, self._leadership, self._beats)
        others = (
            self._life_sign,
            Webhook(self._settings, self._ledger, leads),
            TrackerExports(self._settings, self._ledger, leads),
        )
        for thread in (jobs, *others):
            thread.start()
        try:
            self._run_fleet()
        finally:
            for thread in others:
                thread.stop()
            if self._stack_stops:
                self._hand_in()
            jobs.stop(checkpoint=self._stop.is_set())
            self._leadership.stop()

    # -- replaced by benchmarks ----------------------------------------------------------------

    def make_pools(self) -> PoolRegistry:
        """Return the pools. Raises :class:`SpecError`, :class:`~vcasgd.errors.FleetError`."""
        return PoolRegistry(self._settings, self._control, PresentMachines(self._joined))

    def connect_cluster(self, pools: PoolRegistry) -> Cluster | None:
        """Return the connection to Ray, if a pool needs one.

        Raises :class:`~vcasgd.errors.ClusterError`.
        """
        return None if pools.only_joined else connect_ray(self._settings)

    def fleet_round(self, loop: FleetLoop) -> None:
        """Run one round. Raises the errors of :meth:`FleetLoop.round`."""
        loop.round()

    def _run_fleet(self) -> None:
        settings = self._settings
        pools = patiently(self.make_pools, settings.patience_seconds)
        fleet = patiently(
            lambda: Fleet(
                settings,
                self._ledger,
                pools,
                self._beats,
                lambda: self.connect_cluster(pools),
                lambda: self._leadership.sure,
            ),
            settings.patience_seconds,
        )
        loop = FleetLoop(fleet)
        failures = 0
        while not self._stop.is_set():
            self._leadership.check()
            if self._leadership.sure:
                try:
                    if loop.due():
                        self.fleet_round(loop)
                        self._life_sign.beat()
                        self._report_first_round()
                        failures = 0
                except (StoreUnavailable, StoreFull, StoreDenied) as error:
                    log.warning("ledger: %s", error)
                except (ClusterError, Fenced):
                    raise
                except Exception:
                    failures += 1
                    log.exception("fleet")
                    if failures == MAX_FAILED_ROUNDS:
                        raise
            self._stop.wait(loop.pause)

    def _hand_in(self) -> None:
        try:
            hand_in(Jobs(self._ledger), self._beats, self._settings)
        except StoreError as error:
            log.warning("workers can't hand in: %s", error)

    def _report_first_round(self) -> None:
        """Report the first round in the ledger; ``vcasgd up`` waits for it."""
        if not self._reported:
            self._control.record_round()
            self._reported = True


def main() -> NoReturn:
    """Run the process. It exits with status 0 after a signal to stop and 1 after an error."""
    configure_logging("controller")
    status = 0
    try:
        controller = Controller(load_settings())
        signal.signal(signal.SIGTERM, lambda _number, _frame: controller.stop())
        signal.signal(signal.SIGINT, lambda _number, _frame: controller.stop())
        signal.signal(STACK_STOPS, lambda _number, _frame: controller.stop(stack=True))
        controller.run()
    except VcasgdError as error:
        status = exit_status(error)
    except Exception:
        log.exception("the controller ends")
        status = 1
    logging.shutdown()
    # Ray's own shutdown would wait for a dead head.
    os._exit(status)


if __name__ == "__main__":
    main()
