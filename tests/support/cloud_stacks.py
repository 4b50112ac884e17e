"""Shared helpers for tests of a stack that buys machines in emulated clouds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from support.cloudbox import Box, CloudBox, EmulatedCloud, short_folder
from vcasgd.chaos.audited_job import counting_spec
from vcasgd.client import Client
from vcasgd.fleet.providers.local.processes import kill_all
from vcasgd.schemas.history import EventRow
from vcasgd.schemas.jobs import JobView
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running
from vcasgd.stack.parts import mark
from vcasgd.store.connection import connect
from vcasgd.store.keys import LedgerKeys

WORKERS = 4
HEARTBEAT = 1.0
#: Seconds of a local step while a job is slowed down.
HELD_SECONDS = 0.5


class CloudStack:
    """A stack that buys machines in emulated clouds, and the boxes of the clouds."""

    def __init__(self, settings: Settings, boxes: dict[str, CloudBox]) -> None:
        self.settings = settings
        self.home = StackHome(settings.home_path)
        self.hold = settings.home_path.with_name("hold")
        token = self.home.token()
        assert token is not None
        self.client = Client(StackState.read(self.home.path).api_url, token)
        self._boxes = boxes

    def submit(
        self,
        pools: list[str],
        epochs: int,
        most: int = WORKERS,
        step_seconds: float = HELD_SECONDS,
        **fields: Any,
    ) -> str:
        """Submit a job that runs slowly until :meth:`finish`."""
        self.hold.touch()
        spec = counting_spec(epochs, self.hold).model_dump(mode="json")
        spec["args"]["step_seconds"] = step_seconds
        workers = {"min": 1, "max": most, "pools": pools}
        document = {**spec, "workers": workers, **fields}
        return self.client.submit_directory(JobSpec.parse(document)).id

    def finish(self, job: str) -> JobView:
        self.hold.unlink()
        view = self.client.job(job).wait(300)
        assert view.state == "succeeded", view.reason
        return view

    def training_machines(self, job: str) -> set[str]:
        """Return the machines whose workers train now."""
        fresh = time.time() - 4 * HEARTBEAT
        rows = self.client.job(job).workers()
        return {row.machine for row in rows if (row.at or 0.0) > fresh and row.steps}

    def pool_of(self, machine: str) -> str:
        return next(box.boxes[machine].pool for box in self._boxes.values() if machine in box.boxes)

    def interrupt(self, machines: set[str], notice_seconds: float) -> None:
        for box in self._boxes.values():
            box.interrupt(machines & box.boxes.keys(), notice_seconds)

    def recommend_rebalance(self, machine: str) -> None:
        """Publish EC2's rebalance recommendation."""
        (box,) = (box for box in self._boxes.values() if machine in box.boxes)
        box.recommend_rebalance(machine)

    def events(self, job: str, kind: str) -> list[EventRow]:
        return [event for event in self.client.job(job).events() if event.kind == kind]

    def since(self, job: str, machine: str) -> dict[str, float]:
        """Return when a machine first entered each of its states for the job."""
        (lane,) = (row for row in self.client.job(job).timelines() if row.machine == machine)
        return {span.state: span.since for span in reversed(lane.spans)}

    def offered(self, pool: str) -> set[float]:
        """Return the prices per hour that decide about the next launch of a pool."""
        (row,) = (row for row in self.client.pools() if row.name == pool)
        return {each["price_per_hour"] for each in row.offers or ()}

    def refused(self, pool: str) -> set[str]:
        """Return the zones of a pool that had no capacity at the last request."""
        (row,) = (row for row in self.client.pools() if row.name == pool)
        return {each["zone"] for each in row.markets if each["refused_since"] is not None}

    def requeued_subtasks(self, job: str) -> list[str]:
        """Return the subtasks that a worker did not finish."""
        password = self.home.ensure_password("ledger")
        port = StackState.read(self.home.path).ports["ledger"]
        ledger = connect(f"redis://:{password}@127.0.0.1:{port}/0")
        try:
            names = [each.decode() for each in ledger.hkeys(LedgerKeys(job).counters)]
        finally:
            ledger.close()
        return [name for name in names if name.startswith("again:")]

    def alive(self, clouds: list[EmulatedCloud]) -> set[str]:
        return set().union(*(cloud.alive() for cloud in clouds))

    def kill(self, part: str) -> None:
        process = StackState.read(self.home.path).parts[part].process
        assert process is not None
        assert process.alive(), f"the fault did not fire: {part} was dead already"
        assert kill_all(mark(self.home, part), process)

    def signal(self, part: str, number: int) -> None:
        """Send a signal to one of the stack's processes."""
        process = StackState.read(self.home.path).parts[part].process
        assert process is not None
        os.kill(process.pid, number)

    def logs(self) -> str:
        boxes = "\n".join(box.logs() for box in self._boxes.values())
        return f"{self.home.log_tail('controller')}\n{boxes}"


@contextlib.contextmanager
def cloud_stack(
    home: Path,
    documents: list[dict[str, Any]],
    clouds: dict[str, EmulatedCloud],
    boots: Callable[[Box], bool] = lambda _box: True,
    **more: Any,
) -> Iterator[CloudStack]:
    """Provide a stack; fail if it leaves machines behind.

    ``boots``: see :class:`CloudBox`; ``more``: settings.
    """
    pools = home / "pools.yaml"
    pools.write_text(yaml.safe_dump({"pools": documents}))
    settings = Settings(
        home=home / "home",
        api_port=0,
        heartbeat=HEARTBEAT,
        idle_seconds=3.0,
        pools=pools,
        cluster="boxed",
        **more,
    )
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(short_folder())
        boxes = {
            name: stack.enter_context(CloudBox(cloud, scratch, boots))
            for name, cloud in clouds.items()
        }
        stack.enter_context(running(settings))
        made = CloudStack(settings, boxes)
        stack.callback(made.client.close)
        try:
            yield made
        except BaseException:
            print(made.logs())  # noqa: T201
            raise
        assert not [problem for box in boxes.values() for problem in box.problems]
