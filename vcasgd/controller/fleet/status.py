"""What others see of the fleet."""

from __future__ import annotations

import shutil
import time

from vcasgd.controller.fleet.context import ControllerContext
from vcasgd.controller.fleet.events import FleetRow
from vcasgd.controller.fleet.launch_history import BACKOFF_SECONDS, STILLBORN_SECONDS
from vcasgd.controller.fleet.names import instance_of, worker_name
from vcasgd.fleet.observed import Observed
from vcasgd.fleet.plan import Blame
from vcasgd.fleet.pool_rows import to_row
from vcasgd.fleet.providers.base import Instance


class StatusPublisher:
    """Shows each look, and tidies up after machines that are gone."""

    def __init__(self, parts: ControllerContext) -> None:
        self._parts = parts
        self._settings = parts.settings

    def show(self, state: Observed) -> None:
        job_of = {worker.instance_id: worker.job for worker in state.workers if worker.alive}
        nodes = state.nodes or frozenset()
        rows = {
            one.id: _row(
                one,
                joined=one.id in nodes,
                was_up=one.id in state.history.joined,
                job=job_of.get(one.id),
            )
            for one in state.instances
        }
        ends = self._parts.chronicle.ends(rows.keys())
        for name, row in self._parts.chronicle.never_joined(rows.keys()).items():
            blame = Blame(name, row.pool, row.zone, row.spot, "was gone before it joined")
            # perhaps it was only interrupted early
            stillborn(self._parts, blame, BACKOFF_SECONDS)
        self._parts.timeline.look(state, ends, time.time())
        for gone, job in self._parts.chronicle.show(rows, self._pools(state)).items():
            if job is not None:
                self._forget_workers(job, gone)
            if self._settings.ray_dir is not None:
                shutil.rmtree(self._settings.ray_dir / gone, ignore_errors=True)

    def _forget_workers(self, job: str, gone: str) -> None:
        names = [each for each in self._parts.jobs.workers(job) if instance_of(each) == gone]
        for name in {worker_name(gone, job), *names}:
            self._parts.jobs.remove_worker(job, name)

    def _pools(self, state: Observed) -> dict[str, dict[str, object]]:
        return {
            view.name: to_row(
                view,
                provider=self._parts.estate.pools[view.name].provider,
                labels=self._parts.estate.pools[view.name].labels,
                instances=sum(one.pool == view.name for one in state.instances),
                idle=sum(_is_warm(one, state) for one in state.instances if one.pool == view.name),
            )
            for view in state.pools
        }


def _is_warm(one: Instance, state: Observed) -> bool:
    taken_away = one.notice_at is not None or one.advised_at is not None
    return one.id in state.history.idle and not taken_away


def stillborn(
    parts: ControllerContext, blame: Blame, waits: tuple[float, float] = STILLBORN_SECONDS
) -> None:
    """A machine came to nothing: its market is left alone, and who pays for it hears why."""
    parts.memory.blamed(blame, time.time(), waits)
    job = parts.books.payer(blame.instance_id)
    if job is not None:
        text = f"{blame.instance_id} of pool {blame.pool} {blame.reason}"
        parts.jobs.event(
            job, "boot-failed", text, instance=blame.instance_id, pool=blame.pool, why=blame.reason
        )


def _row(one: Instance, *, joined: bool, was_up: bool, job: str | None) -> FleetRow:
    return FleetRow(
        pool=one.pool,
        state=one.state.value,
        joined=joined,
        job=job,
        launched_at=one.launched_at,
        notice_at=one.notice_at,
        host=one.host,
        spot=one.spot,
        price_per_hour=one.price_per_hour,
        zone=one.zone,
        instance_type=one.instance_type,
        on_demand_price_per_hour=one.on_demand_price_per_hour,
        advised_at=one.advised_at,
        was_up=was_up,
    )
