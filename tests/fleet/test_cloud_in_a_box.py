"""Whole jobs on emulated clouds, from the purchase of machines to their termination.

Every machine is a Ray node on this host, started from its own user data.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cloud_stacks import WORKERS, CloudStack, cloud_stack
from support.cloudbox import Box, EmulatedCloud
from support.machine_roots import metadata_of, run_failing_boot, write_root
from support.provider_backends import AwsBackend, GcpBackend

from vcasgd.storage.objects import LIFE_SIGN, SIGNS, Storage

pytestmark = pytest.mark.slow

#: Log message of a machine that shuts itself down.
ENDS = "no sign of a controller"

#: At least 70% of the workers.
VICTIMS = 3
Eventually = Callable[..., Any]


def interrupted_and_replaced(
    stack: CloudStack,
    pools: list[str],
    exhaust: Callable[[], None],
    clouds: list[EmulatedCloud],
    eventually: Eventually,
    folder: Path,
) -> None:
    """Run a job, interrupt 70% of its machines at once, and check its model and the cleanup."""
    job = stack.submit(pools, epochs=4)
    fleet = eventually(lambda: len(found := stack.training_machines(job)) == WORKERS and found)
    assert {stack.pool_of(one) for one in fleet} == {pools[0]}

    # When most of the fleet is interrupted at once, and its pool has no more capacity
    victims = set(sorted(fleet)[:VICTIMS])
    exhaust()
    stack.interrupt(victims, notice_seconds=20.0)

    # Then machines of another pool replace it, and the job counts every sample once
    eventually(lambda: len(stack.training_machines(job) - fleet) >= VICTIMS)
    assert {stack.pool_of(one) for one in stack.training_machines(job) - fleet} <= set(pools[1:])
    eventually(lambda: stack.client.job(job).evictions >= VICTIMS)
    view = stack.finish(job)
    counts = load_file(stack.client.job(job).download(folder / "model.safetensors", "last"))[
        "count"
    ]
    assert torch.equal(counts, torch.full_like(counts, view.progress.epochs))
    assert view.progress.samples_repeated == 0

    # And nothing is left that costs money
    eventually(lambda: not stack.alive(clouds))


@pytest.mark.extended
def test_a_fleet_of_aws_is_interrupted_and_replaced(
    aws: AwsBackend, tmp_path: Path, eventually: Eventually
) -> None:
    a, b = aws.zones
    documents = [aws.document(name="first", zones=[a]), aws.document(name="second", zones=[b])]
    with cloud_stack(tmp_path, documents, {"aws": aws}) as stack:
        interrupted_and_replaced(
            stack, ["first", "second"], lambda: aws.exhaust(a), [aws], eventually, tmp_path
        )


@pytest.mark.extended
def test_a_fleet_of_google_is_interrupted_and_replaced(
    gcp: GcpBackend, tmp_path: Path, eventually: Eventually
) -> None:
    a, b = gcp.zones
    documents = [gcp.document(name="first", zones=[a]), gcp.document(name="second", zones=[b])]
    with cloud_stack(tmp_path, documents, {"gcp": gcp}, compute_url=gcp.url) as stack:
        interrupted_and_replaced(
            stack, ["first", "second"], lambda: gcp.exhaust(a), [gcp], eventually, tmp_path
        )


@pytest.mark.extended
def test_job_continues_in_another_cloud(
    aws: AwsBackend, gcp: GcpBackend, tmp_path: Path, eventually: Eventually
) -> None:
    documents = [aws.document(), gcp.document()]
    clouds: dict[str, EmulatedCloud] = {"aws": aws, "gcp": gcp}
    with cloud_stack(tmp_path, documents, clouds, compute_url=gcp.url) as stack:
        interrupted_and_replaced(
            stack,
            [aws.pool, gcp.pool],
            lambda: aws.exhaust(*aws.zones),
            [aws, gcp],
            eventually,
            tmp_path,
        )


@pytest.mark.extended
def test_controller_that_dies_after_a_purchase_leaks_nothing(
    aws: AwsBackend, tmp_path: Path, eventually: Eventually
) -> None:
    with cloud_stack(tmp_path, [aws.document()], {"aws": aws}) as stack:
        # Given a controller that is killed after EC2 created machines, before it recorded them
        fired: list[set[str]] = []

        def die() -> None:
            fired.append(aws.alive())
            stack.kill("controller")

        aws.ec2.made = die
        job = stack.submit([aws.pool], epochs=2)

        # When it restarts
        eventually(lambda: fired)
        bought = fired[0]
        assert bought, "the fault fired before anything was bought"
        eventually(lambda: bought <= {row.id for row in stack.client.machines()})

        # Then it finds its machines and does not repeat the purchase: its next purchase
        # is in the other zone
        eventually(lambda: aws.alive() == {row.id for row in stack.client.machines()})
        assert bought <= aws.alive()
        assert len(aws.alive()) <= WORKERS
        stack.finish(job)
        eventually(lambda: not aws.alive())


@pytest.mark.extended
def test_machines_of_a_controller_that_stays_down_end_themselves(
    aws: AwsBackend, tmp_path: Path, eventually: Eventually
) -> None:
    with cloud_stack(tmp_path, [aws.document()], {"aws": aws}, orphan_seconds=20) as stack:
        # Given machines that have trained for longer than they may without a controller
        job = stack.submit([aws.pool], epochs=40, most=2)
        eventually(lambda: len(stack.training_machines(job)) == 2)
        signs: set[bytes] = set()
        storage = Storage(f"file://{stack.home.path}/storage")
        eventually(lambda: signs.add(storage.get(LIFE_SIGN)) or len(signs) >= 2 * SIGNS)
        assert ENDS not in stack.logs()

        # When the controller hangs, then each of them ends
        stack.signal("controller", signal.SIGSTOP)
        eventually(lambda: stack.logs().count(ENDS) >= 2)
        stack.signal("controller", signal.SIGCONT)
        stack.client.job(job).cancel()
        eventually(lambda: not aws.alive())


@pytest.mark.extended
def test_machine_with_a_rebalance_advice_is_replaced_before_it_leaves(
    aws: AwsBackend, tmp_path: Path, eventually: Eventually
) -> None:
    with cloud_stack(tmp_path, [aws.document()], {"aws": aws}) as stack:
        # Given two running machines, on subtasks that take seconds
        job = stack.submit([aws.pool], epochs=40, most=2, step_seconds=0.1, subtasks_per_epoch=8)
        fleet = eventually(lambda: len(found := stack.training_machines(job)) == 2 and found)
        advised = min(fleet)

        # When EC2 recommends leaving one of them
        stack.recommend_rebalance(advised)
        eventually(lambda: "dead" in stack.since(job, advised))

        # Then a replacement was ordered and running before this one was asked to leave
        (advice,) = stack.events(job, "rebalance-advice")
        assert advice.details["machine"] == advised
        (newcomer,) = stack.training_machines(job) - fleet
        came, went = stack.since(job, newcomer), stack.since(job, advised)
        # EC2 reports launch times in whole seconds.
        assert int(advice.at) <= came["booting"] < came["running"]
        assert came["running"] <= went["draining"] < went["dead"]
        # And it finished its subtask
        assert stack.requeued_subtasks(job) == []
        view = stack.client.job(job).cancel()
        assert (view.evictions, view.kills, view.progress.samples_repeated) == (0, 0, 0)
        eventually(lambda: not aws.alive())


@pytest.mark.extended
def test_failed_boot_is_reported_and_the_next_machine_is_bought_elsewhere(
    aws: AwsBackend, tmp_path: Path, eventually: Eventually
) -> None:
    a, b = aws.zones
    documents = [aws.document(name="first", zones=[a]), aws.document(name="second", zones=[b])]
    reports: dict[str, subprocess.CompletedProcess[str]] = {}

    def boots(box: Box) -> bool:
        """Run the real script; in the first pool, one of its steps fails."""
        if box.pool == "first":
            root = box.folder / "root"
            write_root(root, "CLOUD=aws\nROLE=worker\nCLUSTER=boxed\n")
            with metadata_of(box.id) as metadata:
                where = {"VCASGD_METADATA_URL": metadata, "AWS_ENDPOINT_URL": aws.ec2.url}
                reports[box.id] = run_failing_boot(root, where)
        return box.pool != "first"

    with cloud_stack(tmp_path, documents, {"aws": aws}, boots) as stack:
        job = stack.submit(["first", "second"], epochs=40, most=1, step_seconds=0.1)
        eventually(lambda: stack.training_machines(job))

        # Then the machine was terminated for its report, long before its boot deadline
        (failed,) = reports
        assert reports[failed].returncode == 1, "the fault did not fire"
        (event,) = stack.events(job, "boot-failed")
        why = "did not boot: worker: step add_user failed (status 1)"
        assert event.details == {"machine": failed, "pool": "first", "why": why}
        assert failed not in aws.alive()
        # And its pool is paused and shows the reason
        (first,) = (row for row in stack.client.pools() if row.name == "first")
        assert why in first.reason
        assert first.blocked_until == 0.0, "only that zone is"
        assert {stack.pool_of(one) for one in stack.training_machines(job)} == {"second"}
        stack.client.job(job).cancel()
        eventually(lambda: not aws.alive())


@pytest.mark.extended
def test_prices_and_shortages_decide_what_is_bought_next_and_move_nothing(
    aws: AwsBackend, tmp_path: Path, eventually: Eventually
) -> None:
    a, b = aws.zones
    documents = [
        aws.document(name="first", zones=[a], max_price_per_hour=0.1),
        aws.document(name="second", zones=[b]),
    ]
    with cloud_stack(tmp_path, documents, {"aws": aws}, price_seconds=1.0) as stack:

        def price(of: set[str]) -> set[float]:
            rows = stack.client.machines()
            return {row.price_per_hour for row in rows if row.id in of}

        # Given two machines of the pool that the job prefers
        job = stack.submit(["first", "second"], epochs=60, most=2, step_seconds=0.1)
        fleet = eventually(lambda: len(found := stack.training_machines(job)) == 2 and found)
        assert {stack.pool_of(one) for one in fleet} == {"first"}

        # When its price swings around the maximum, nothing is bought or terminated
        bought = aws.ec2.calls.count("CreateFleet")
        for usd in (0.2, 0.06, 0.2):
            aws.ec2.prices[aws.kind, a] = usd
            eventually(lambda usd=usd: price(fleet) == stack.offered("first") == {usd})
        assert aws.alive() == fleet
        assert aws.ec2.calls.count("CreateFleet") == bought

        # When one is interrupted while the price is high, the next one is from the other pool
        stack.interrupt({min(fleet)}, notice_seconds=20.0)
        eventually(lambda: stack.training_machines(job) - fleet)
        (second,) = stack.training_machines(job) - fleet
        assert stack.pool_of(second) == "second"

        # When all are interrupted at once, at a low price and without capacity in that pool
        aws.ec2.prices[aws.kind, a] = 0.05
        eventually(lambda: price({max(fleet)}) == stack.offered("first") == {0.05})
        aws.exhaust(a)
        before = {*fleet, second}
        stack.interrupt({max(fleet), second}, notice_seconds=20.0)
        eventually(lambda: stack.refused("first") == {a})
        eventually(lambda: len(stack.training_machines(job) - before) == 2)
        assert {stack.pool_of(one) for one in stack.training_machines(job) - before} == {"second"}

        # Then each hour was charged at the price of its time
        eventually(lambda: stack.client.job(job).evictions == 3)
        assert stack.client.job(job).cancel().progress.samples_repeated == 0
        eventually(lambda: not aws.alive())
        per_hour = {
            row.pool: (row.usd / row.seconds * 3600, row.on_demand_usd / row.usd)
            for row in stack.client.job(job).cost().pools
        }
        assert 0.05 < per_hour["first"][0] < 0.2
        assert per_hour["second"] == pytest.approx((0.05, 0.17 / 0.05))
