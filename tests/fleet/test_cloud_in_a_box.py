"""Whole jobs on emulated clouds, from the purchase of machines to their termination.

Every machine is a Ray node on this host, started from its own user data.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.cloudbox import CloudBox, EmulatedCloud, short_folder
from support.provider_backends import AwsBackend, GcpBackend
from support.waiting import await_truth

from vcasgd.chaos.audited_job import counting_spec
from vcasgd.client import Client
from vcasgd.settings import Settings
from vcasgd.spec.job import JobSpec
from vcasgd.stack import StackHome, StackState, running

WORKERS = 4
HEARTBEAT = 1.0
#: Seconds of a local step while a job is slowed down.
HELD_SECONDS = 0.5
#: At least 70% of the workers.
VICTIMS = 3


class CloudStack:
    """A stack that buys machines in emulated clouds, and the boxes of the clouds."""

    def __init__(self, settings: Settings, boxes: dict[str, CloudBox]) -> None:
        self.home = StackHome(settings.home_path)
        self.hold = settings.home_path.with_name("hold")
        token = self.home.token()
        assert token is not None
        self.client = Client(StackState.read(self.home.path).api_url, token)
        self.boxes = boxes

    def submit(self, pools: list[str], epochs: int) -> str:
        """Submit a job that runs slowly until ``hold`` is removed."""
        self.hold.touch()
        spec = counting_spec(epochs, self.hold).model_dump(mode="json")
        spec["args"]["step_seconds"] = HELD_SECONDS
        workers = {"min": 1, "max": WORKERS, "pools": pools}
        return self.client.submit_directory(JobSpec.parse({**spec, "workers": workers})).id

    def training_machines(self, job: str) -> set[str]:
        """Return the machines whose workers train now."""
        fresh = time.time() - 4 * HEARTBEAT
        rows = self.client.job(job).workers()
        return {row.machine for row in rows if (row.at or 0.0) > fresh and row.steps}

    def cloud_of(self, machine: str) -> str:
        return next(name for name, box in self.boxes.items() if machine in box.boxes)

    def logs(self) -> str:
        boxes = "\n".join(box.logs() for box in self.boxes.values())
        return f"{self.home.log_tail('controller')}\n{boxes}"


@contextlib.contextmanager
def cloud_stack(
    home: Path,
    documents: list[dict[str, Any]],
    clouds: dict[str, EmulatedCloud],
    compute_url: str,
) -> Iterator[CloudStack]:
    """Provide a stack; fail if it leaves machines behind."""
    pools = home / "pools.yaml"
    pools.write_text(yaml.safe_dump({"pools": documents}))
    settings = Settings(
        home=home / "home",
        api_port=0,
        heartbeat=HEARTBEAT,
        idle_seconds=3.0,
        pools=pools,
        cluster="boxed",
        compute_url=compute_url,
    )
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(short_folder())
        boxes = {
            name: stack.enter_context(CloudBox(cloud, scratch)) for name, cloud in clouds.items()
        }
        stack.enter_context(running(settings))
        made = CloudStack(settings, boxes)
        stack.callback(made.client.close)
        try:
            yield made
        except BaseException as error:  # also a failed test's
            error.add_note(made.logs())
            raise
        assert not [problem for box in boxes.values() for problem in box.problems]


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("first", ["aws", "gcp"])
def test_a_fleet_is_interrupted_and_replaced_in_another_cloud(
    aws: AwsBackend, gcp: GcpBackend, tmp_path: Path, first: str
) -> None:
    clouds: dict[str, AwsBackend | GcpBackend] = {"aws": aws, "gcp": gcp}
    order = sorted(clouds, key=lambda name: name != first)
    documents = [clouds[name].document() for name in order]
    with cloud_stack(tmp_path, documents, {**clouds}, gcp.url) as stack:
        # Given a job on a fleet of one cloud
        job = stack.submit([clouds[name].pool for name in order], epochs=4)
        fleet = await_truth(lambda: len(found := stack.training_machines(job)) == WORKERS and found)
        assert {stack.cloud_of(one) for one in fleet} == {first}

        # When most of it is interrupted at once, and that cloud has no more capacity
        victims = set(sorted(fleet)[:VICTIMS])
        clouds[first].exhaust(*clouds[first].zones)
        stack.boxes[first].interrupt(victims, notice_seconds=20.0)

        # Then machines of the other one replace it, and the job counts every sample once
        await_truth(lambda: len(stack.training_machines(job) - fleet) >= VICTIMS)
        others = {stack.cloud_of(one) for one in stack.training_machines(job) - fleet}
        assert others == {order[1]}
        await_truth(lambda: stack.client.job(job).evictions >= VICTIMS)
        stack.hold.unlink()
        view = stack.client.job(job).wait(300)
        assert view.state == "succeeded", view.reason
        model = stack.client.job(job).download(tmp_path / "model.safetensors", "last")
        counts = load_file(model)["count"]
        assert torch.equal(counts, torch.full_like(counts, view.progress.epochs))
        assert view.progress.samples_repeated == 0

        # And nothing is left that costs money
        await_truth(lambda: not aws.alive() | gcp.alive())
