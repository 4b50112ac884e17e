"""Processes of workers on a machine that joined, without a stack."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.waiting import await_truth

from vcasgd.agent.availability import Availability, StackSilence, Terms
from vcasgd.agent.worker_process import JoinedWorker
from vcasgd.child_process import visible
from vcasgd.errors import PackageError
from vcasgd.machine.workers import WorkerSet
from vcasgd.schemas.joining import MAX_REASON_LENGTH, OrderView, ReportBody

ORDER = OrderView(
    worker="job.join-ann-1",
    start="1",
    job="job",
    name="job",
    package="0" * 64,
    env={"VCASGD_LEDGER_URL": "http://user:secret@/sockets/ledger"},
)


def no_code(_order: OrderView, _into: Path) -> None:
    """Fetch nothing."""


def started(folder: Path, fetch: Callable[[OrderView, Path], None] = no_code) -> JoinedWorker:
    processors = sorted(os.sched_getaffinity(0))
    terms = Terms(Availability(), None, StackSilence(), processors, visible(os.environ), None)
    return JoinedWorker(ORDER, folder, terms, 1.0, fetch)


@pytest.mark.ci
def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    # Given settings that a worker refuses
    worker = started(tmp_path)
    assert worker.ended is None

    def ended() -> bool:
        worker.update()
        return worker.ended is not None

    await_truth(ended)
    assert worker.failed
    assert "status 1: " in str(worker.ended)
    assert "VCASGD_LEDGER_URL: is not of the form redis://" in str(worker.ended)
    assert "secret" not in str(worker.ended)
    assert len(str(worker.ended)) <= MAX_REASON_LENGTH


@pytest.mark.parametrize(
    "error", [PackageError("package 00 is damaged"), ValueError("of a library")]
)
def test_code_that_can_not_be_fetched_ends_its_worker(tmp_path: Path, error: Exception) -> None:
    def fail(_order: OrderView, _into: Path) -> None:
        raise error

    worker = started(tmp_path, fail)

    def ended() -> str | None:
        worker.update()
        return worker.ended

    assert await_truth(ended) == f"its code can't be fetched: {error}"
    assert worker.failed


def test_a_worker_that_has_not_started_leaves_and_dies_at_once(tmp_path: Path) -> None:
    leaving, killed = started(tmp_path), started(tmp_path)

    leaving.leave()
    killed.kill()

    assert (leaving.ended, killed.ended) == ("the machine leaves", "it was killed")


def test_workers_see_no_variables_of_the_machines_owner() -> None:
    own = {"PATH": "/bin", "LC_ALL": "C", "AWS_SECRET_ACCESS_KEY": "x", "DATA": "/data",
           "VCASGD_TOKEN": "x", "PYTHONPATH": "/lib"}  # fmt: skip
    assert visible(own).keys() == {"PATH", "LC_ALL", "PYTHONPATH"}
    assert visible(own, ["DATA", "VCASGD_TOKEN"]).keys() == {"PATH", "LC_ALL", "PYTHONPATH", "DATA"}
    assert visible(own, ordered=True).keys() == own.keys() - {"VCASGD_TOKEN"}


@pytest.mark.parametrize(
    "name",
    ["NVIDIA_API_KEY", "CUDA_REGISTRY_TOKEN", "PYTHON_KEYRING_SECRET", "PYTORCH_TOKEN",
     "HIP_KEY", "MKL_LICENSE", "OMP_SECRET", "LC_PASSWORD", "path"],
)  # fmt: skip
def test_a_key_with_the_beginning_of_a_librarys_name_is_not_seen(name: str) -> None:
    assert visible({name: "x"}) == {}


def test_variables_reach_the_process_of_a_worker(tmp_path: Path) -> None:
    workers = WorkerSet(lambda _order: started(tmp_path))
    workers.follow([ORDER])

    def process() -> psutil.Process | None:
        workers.update()
        children = psutil.Process().children()
        return next((c for c in children if "vcasgd.worker.main" in c.cmdline()), None)

    found = set(await_truth(process).environ())
    assert {"PATH", "VCASGD_LEDGER_URL"} <= found
    assert not [name for name in found if name.startswith("PYTEST")]
    workers.kill()
    assert not workers.running


def test_a_machine_reports_its_workers(tmp_path: Path) -> None:
    workers = WorkerSet(lambda _order: started(tmp_path))
    assert workers.follow([ORDER]) == [ORDER]
    assert workers.follow([ORDER]) == []
    rows = workers.report(MAX_REASON_LENGTH)
    assert ReportBody.model_validate({"workers": rows}).model_dump()["workers"] == rows
    assert rows == {ORDER.worker: {"start": "1", "ended": None}}
    workers.kill()
    assert workers.report(6)[ORDER.worker]["ended"] == "it was"
    assert [worker.order for worker in workers.update()] == [ORDER]
    assert workers.update() == []
    workers.follow([])
    assert workers.report(6) == {}
