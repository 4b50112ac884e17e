"""Jobs that share the machines of a whole stack: preemption, and machines that change jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vcasgd.chaos.audited_job import counting_spec
from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running

pytestmark = [pytest.mark.slow, pytest.mark.extended]

Eventually = Callable[..., Any]
MACHINES = 2
#: Seconds of a local step while a job is held up.
HELD_SECONDS = 0.5


class Sharing:
    """A stack with few machines."""

    def __init__(self, folder: Path, client: Client) -> None:
        self.folder = folder
        self.client = client

    def submit(self, name: str, least: int, **fields: Any) -> str:
        """Submit a job that takes its time until :meth:`finish`."""
        hold = self.folder / name
        hold.touch()
        spec = counting_spec(3, hold).model_dump(mode="json")
        spec["args"]["step_seconds"] = HELD_SECONDS
        spec |= {"name": name, "workers": {"min": least, "max": MACHINES}, **fields}
        return self.client.submit_directory(JobSpec.parse(spec)).id

    def machines(self, job: str) -> set[str]:
        return {row.id for row in self.client.machines() if row.job == job}

    def events(self, job: str, kind: str) -> list[dict[str, Any]]:
        return [each.details for each in self.client.job(job).events() if each.kind == kind]

    def finish(self, name: str, job: str) -> None:
        """Let the job end. Its model must count every sample exactly once in each epoch."""
        (self.folder / name).unlink()
        view = self.client.job(job).wait(300)
        assert view.state == "succeeded", view.reason
        file = self.client.job(job).download(self.folder / f"{name}.safetensors")
        counts = load_file(file)["count"]
        assert torch.equal(counts, torch.full_like(counts, 3))


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sharing]:
    folder = tmp_path_factory.mktemp("sharing")
    settings = Settings(
        home=folder / "home",
        api_port=0,
        local_capacity=MACHINES,
        idle_seconds=300.0,
        hold_seconds=1.0,
    )
    with running(settings):
        home = StackHome(settings.home_path)
        with Client(StackState.read(home.path).api_url, home.token() or "") as client:
            yield Sharing(folder, client)


def test_machines_go_to_the_higher_priority_and_come_back(
    sharing: Sharing, eventually: Eventually
) -> None:
    client = sharing.client
    early = sharing.submit("early", 1, priority="low")
    eventually(lambda: len(sharing.machines(early)) == MACHINES)
    eventually(lambda: client.job(early).totals.updates)
    machines = sharing.machines(early)

    # When a job of a higher priority comes
    late = sharing.submit("late", 0)

    # Then it gets all but the minimum of the other one, and both say why
    eventually(lambda: len(sharing.machines(late)) == 1)
    (moved,) = sharing.machines(late)
    assert sharing.machines(early) == machines - {moved}
    details = {"machine": moved, "from": early, "to": late}
    assert sharing.events(early, "machine-given") == [details]
    assert sharing.events(late, "machine-received") == [details]
    assert eventually(lambda: client.job(late).waiting) == (
        f"waits for 1 of 2 machines: 1 job of lower priority, local: {MACHINES} of {MACHINES} "
        "machines in use"
    )

    # When both have the same priority and minimum, nothing moves; when they end, machines change
    # their jobs without a restart
    assert client.job(early).change(priority="normal").spec.priority == "normal"
    eventually(lambda: client.job(late).totals.updates)
    sharing.finish("late", late)
    eventually(lambda: sharing.machines(early) == machines)
    assert len(sharing.events(early, "machine-given")) == 1
    sharing.finish("early", early)
    assert {row.id for row in client.machines()} == machines
    assert not sharing.events(early, "worker-crashed")
    assert not sharing.events(late, "worker-crashed")
