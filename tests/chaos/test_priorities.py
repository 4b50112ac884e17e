"""Jobs that share the machines of a whole stack: preemption, and machines that change jobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.counted_job import HELD_SECONDS, CountedJob, client_of

from vcasgd.client import Client
from vcasgd.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.extended]

Eventually = Callable[..., Any]
MACHINES = 2


def submit(client: Client, folder: Path, least: int, **fields: Any) -> CountedJob:
    workers = {"min": least, "max": MACHINES}
    return CountedJob(client, folder, 3, step_seconds=HELD_SECONDS, workers=workers, **fields)


def test_machines_go_to_the_higher_priority_and_come_back(
    tmp_path: Path, eventually: Eventually
) -> None:
    settings = Settings(
        home=tmp_path / "home",
        api_port=0,
        local_capacity=MACHINES,
        idle_seconds=300.0,
        hold_seconds=1.0,
    )
    with client_of(settings) as client:
        early = submit(client, tmp_path, 1, priority="low")
        eventually(lambda: len(early.machines()) == MACHINES)
        eventually(early.updates)
        machines = early.machines()

        # When a job of a higher priority comes
        late = submit(client, tmp_path, 0)

        # Then it gets all but the minimum of the other one, and both say why
        eventually(lambda: len(late.machines()) == 1)
        (moved,) = late.machines()
        assert early.machines() == machines - {moved}
        details = {"machine": moved, "from": early.id, "to": late.id}
        assert early.events("machine-given") == [details]
        assert late.events("machine-received") == [details]
        assert eventually(lambda: client.job(late.id).waiting) == (
            "position 1 of 2: waits for 1 of 2 machines; 1 lower-priority job keeps its minimum; "
            f"local: {MACHINES} of {MACHINES} machines in use"
        )

        # When both have the same priority and minimum, nothing moves; when they end, machines
        # change their jobs without a restart
        assert client.job(early.id).change(priority="normal").spec.priority == "normal"
        eventually(late.updates)
        late.finish()
        eventually(lambda: early.machines() == machines)
        assert len(early.events("machine-given")) == 1
        early.finish()
        assert {row.id for row in client.machines()} == machines
        assert not early.events("worker-crashed")
        assert not late.events("worker-crashed")
