"""What others see of the fleet."""

from __future__ import annotations

import shutil

from vcasgd.fleet.observed import Observed
from vcasgd.runtime.chronicle import Chronicle, Row
from vcasgd.runtime.controller.names import worker_name
from vcasgd.settings import Settings
from vcasgd.store.jobs import Jobs


class Teller:
    """Shows each look, and tidies up after machines that are gone."""

    def __init__(self, settings: Settings, jobs: Jobs, chronicle: Chronicle) -> None:
        self._settings = settings
        self._jobs = jobs
        self._chronicle = chronicle

    def show(self, state: Observed) -> None:
        job_of = {worker.instance_id: worker.job for worker in state.workers if worker.alive}
        pools = {
            pool.name: {
                "blocked_until": pool.blocked_until,
                "reason": pool.reason,
                "launches": pool.launches,
                "instances": sum(one.pool == pool.name for one in state.instances),
            }
            for pool in state.pools
        }
        rows = {
            one.id: Row(
                pool=one.pool,
                state=one.state.value,
                joined=one.id in (state.nodes or ()),
                job=job_of.get(one.id),
                launched_at=one.launched_at,
                notice_at=one.notice_at,
                host=one.host,
                spot=one.spot,
                price_per_hour=one.price_per_hour,
            )
            for one in state.instances
        }
        for gone, job in self._chronicle.show(rows, pools).items():
            if job is not None:
                self._jobs.forget_worker(job, worker_name(gone, job))
            if self._settings.ray_dir is not None:
                shutil.rmtree(self._settings.ray_dir / gone, ignore_errors=True)
