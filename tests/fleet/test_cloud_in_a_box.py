"""Whole jobs on emulated clouds: bought over the clouds' APIs, booted, interrupted, replaced, and
given back. Every machine is a Ray node on this host, started from its own user data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cloudbox import CloudBox, EmulatedCloud, short_folder
from provider_worlds import AwsWorld, GcpWorld, aws_world, gcp_world
from safetensors.torch import load_file

from vcasgd.chaos.audit import Options, audit_spec
from vcasgd.client import Client, JobView
from vcasgd.fleet.providers.local_processes import kill_all
from vcasgd.settings import Settings
from vcasgd.spec import JobSpec
from vcasgd.stack import StackHome, StackState, running
from vcasgd.stack.parts import mark

pytestmark = pytest.mark.slow

WORKERS = 4
#: of them 70 % at least
VICTIMS = 3
HEARTBEAT = 1.0
#: of a local step while a job is held up
HELD_SECONDS = 0.5
Eventually = Callable[..., Any]


class Site:
    """A stack that buys in emulated clouds, and the clouds in their boxes."""

    def __init__(self, settings: Settings, boxes: dict[str, CloudBox]) -> None:
        self.settings = settings
        self.home = StackHome(settings.home_path)
        self.hold = settings.home_path.with_name("hold")
        token = self.home.token()
        assert token is not None
        self.client = Client(StackState.read(self.home.path).api_url, token)
        self._boxes = boxes

    def submit(self, pools: list[str], epochs: int) -> str:
        """A job that is held up until :meth:`finish`."""
        self.hold.touch()
        spec = audit_spec(Options(kills=1, epochs=epochs), self.hold).model_dump(mode="json")
        spec["args"]["step_seconds"] = HELD_SECONDS
        workers = {"min": 1, "max": WORKERS, "pools": pools}
        return self.client.submit_directory(JobSpec.parse({**spec, "workers": workers})).id

    def finish(self, job: str) -> JobView:
        self.hold.unlink()
        view = self.client.wait(job, 300)
        assert view.state == "succeeded", view.reason
        return view

    def at_work(self, job: str) -> set[str]:
        """Machines whose worker trains now."""
        fresh = time.time() - 4 * HEARTBEAT
        rows = self.client.workers(job)
        return {row["instance"] for row in rows if row["at"] > fresh and row["steps"]}

    def pool_of(self, instance: str) -> str:
        return next(
            box.boxes[instance].pool for box in self._boxes.values() if instance in box.boxes
        )

    def interrupt(self, instances: set[str], notice_seconds: float) -> None:
        for box in self._boxes.values():
            box.interrupt(instances & box.boxes.keys(), notice_seconds)

    def alive(self, clouds: list[EmulatedCloud]) -> set[str]:
        return set().union(*(cloud.alive() for cloud in clouds))

    def kill(self, part: str) -> None:
        process = StackState.read(self.home.path).parts[part].process
        assert process is not None
        assert process.alive(), f"the fault did not fire: {part} was dead already"
        assert kill_all(mark(self.home, part), process)

    def logs(self) -> str:
        boxes = "\n".join(box.logs() for box in self._boxes.values())
        return f"{self.home.log_tail('controller')}\n{boxes}"


@contextlib.contextmanager
def site(
    home: Path, documents: list[dict[str, Any]], clouds: dict[str, EmulatedCloud], **more: Any
) -> Iterator[Site]:
    """Ends with nothing left, or fails."""
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
            name: stack.enter_context(CloudBox(cloud, scratch)) for name, cloud in clouds.items()
        }
        stack.enter_context(running(settings))
        made = Site(settings, boxes)
        stack.callback(made.client.close)
        try:
            yield made
        except BaseException:
            print(made.logs())  # noqa: T201
            raise
        assert not [problem for box in boxes.values() for problem in box.problems]


def interrupted_and_replaced(
    here: Site,
    pools: list[str],
    run_out: Callable[[], None],
    clouds: list[EmulatedCloud],
    eventually: Eventually,
    folder: Path,
) -> None:
    """Submit → fleet → training → 70 % gone at once → replaced from elsewhere → model → nothing."""
    job = here.submit(pools, epochs=4)
    fleet = eventually(lambda: len(found := here.at_work(job)) == WORKERS and found)
    assert {here.pool_of(one) for one in fleet} == {pools[0]}

    # When most of it is interrupted at once, and there is nothing more to buy there
    victims = set(sorted(fleet)[:VICTIMS])
    run_out()
    here.interrupt(victims, notice_seconds=20.0)

    # Then others take over from another pool, and the job ends with every sample counted once
    eventually(lambda: len(here.at_work(job) - fleet) >= VICTIMS)
    assert {here.pool_of(one) for one in here.at_work(job) - fleet} <= set(pools[1:])
    eventually(lambda: here.client.job(job).evictions >= VICTIMS)
    view = here.finish(job)
    counts = load_file(here.client.download(job, folder / "model.safetensors"))["count"]
    assert torch.equal(counts, torch.full_like(counts, view.progress.epochs))
    assert view.progress.samples_repeated == 0

    # and nothing is left that costs money
    eventually(lambda: not here.alive(clouds))


@pytest.fixture
def aws() -> Iterator[AwsWorld]:
    with aws_world() as world:
        yield world


@pytest.fixture
def gcp() -> Iterator[GcpWorld]:
    with gcp_world() as world:
        yield world


def test_a_fleet_of_aws_is_interrupted_and_replaced(
    aws: AwsWorld, tmp_path: Path, eventually: Eventually
) -> None:
    a, b = aws.zones
    documents = [aws.document(name="first", zones=[a]), aws.document(name="second", zones=[b])]
    with site(tmp_path, documents, {"aws": aws}) as here:
        interrupted_and_replaced(
            here, ["first", "second"], lambda: aws.run_out(a), [aws], eventually, tmp_path
        )


def test_a_fleet_of_google_is_interrupted_and_replaced(
    gcp: GcpWorld, tmp_path: Path, eventually: Eventually
) -> None:
    a, b = gcp.zones
    documents = [gcp.document(name="first", zones=[a]), gcp.document(name="second", zones=[b])]
    with site(tmp_path, documents, {"gcp": gcp}, compute_url=gcp.url) as here:
        interrupted_and_replaced(
            here, ["first", "second"], lambda: gcp.run_out(a), [gcp], eventually, tmp_path
        )


def test_one_job_goes_on_in_another_cloud(
    aws: AwsWorld, gcp: GcpWorld, tmp_path: Path, eventually: Eventually
) -> None:
    documents = [aws.document(), gcp.document()]
    clouds: dict[str, EmulatedCloud] = {"aws": aws, "gcp": gcp}
    with site(tmp_path, documents, clouds, compute_url=gcp.url) as here:
        interrupted_and_replaced(
            here,
            [aws.pool, gcp.pool],
            lambda: aws.run_out(*aws.zones),
            [aws, gcp],
            eventually,
            tmp_path,
        )


def test_a_controller_that_dies_after_the_purchase_leaks_nothing(
    aws: AwsWorld, tmp_path: Path, eventually: Eventually
) -> None:
    with site(tmp_path, [aws.document()], {"aws": aws}) as here:
        # Given a controller that is killed when EC2 has made machines and nobody knows it yet
        fired: list[set[str]] = []

        def die() -> None:
            fired.append(aws.alive())
            here.kill("controller")

        aws.ec2.made = die
        job = here.submit([aws.pool], epochs=2)

        # When it is started again
        eventually(lambda: fired)
        bought = fired[0]
        assert bought, "the fault fired before anything was bought"
        eventually(lambda: bought <= {row["id"] for row in here.client.instances()})

        # Then it knows what it bought, and the same purchase was not made twice: what it buys
        # now is in the other zone
        eventually(lambda: aws.alive() == {row["id"] for row in here.client.instances()})
        assert bought <= aws.alive()
        assert len(aws.alive()) <= WORKERS
        here.finish(job)
        eventually(lambda: not aws.alive())
