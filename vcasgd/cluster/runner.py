"""The process that Ray places on each node: it runs the workers of the machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vcasgd.cluster.commands import FORKS_VARIABLE
from vcasgd.fleet.notices import NOTICE_FILE_VARIABLE, FileNotices
from vcasgd.machine.workers import WorkerProcess, WorkerSet

#: Most letters of the reason for which a worker has ended.
MAX_REASON_LENGTH = 500
#: Start of the variables of Ray, which a worker must not use.
_RAY = "RAY_"


@dataclass(frozen=True)
class RunnerOrder:
    """A worker to run; see :class:`~vcasgd.machine.workers.Order`."""

    worker: str
    job: str
    start: str
    env: Mapping[str, str]


class Runner:
    """Ray actor, one on each node. Its workers end with it, and it ends with the node.

    They are forks of the process that the node has for that (:mod:`vcasgd.cluster.start`).
    """

    def __init__(self) -> None:
        self._forks = Path(os.environ[FORKS_VARIABLE])
        self._folder = self._forks.with_name("workers")
        self._folder.mkdir(exist_ok=True)
        notice_file = os.environ.get(NOTICE_FILE_VARIABLE)
        self._notices = FileNotices(Path(notice_file)) if notice_file else None
        self._workers = WorkerSet(self._make)

    def _make(self, order: RunnerOrder) -> WorkerProcess:
        env = {name: value for name, value in os.environ.items() if not name.startswith(_RAY)}
        return WorkerProcess(order, self._folder, {**env, **order.env}, self._forks)

    def follow(self, orders: str | None) -> str:
        """Run the workers of these orders, or go on; return the report of the machine.

        Both are JSON: a list of :class:`~vcasgd.store.ledger.machines.WorkerOrder`, and a
        :class:`~vcasgd.store.ledger.machines.MachineReport`.
        """
        if orders is not None:
            self._workers.follow(RunnerOrder(**row) for row in json.loads(orders))
        self._workers.update()
        notice = self._notices and self._notices.poll()
        workers = self._workers.report(MAX_REASON_LENGTH)
        report = {"at": time.time(), "workers": workers, "notice": notice and asdict(notice)}
        return json.dumps(report)
