"""Attackers with every kind of credential, at once, beside a job whose samples are counted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.attackers import ATTACKERS
from support.children import Process
from support.counted_job import CountedJob
from support.harness import worker_credentials
from support.hostile import PAGES, Hostile, readable
from support.joinable_stack import Volunteers, joinable_stack
from support.stacks import server_url
from support.waiting import await_truth

import vcasgd
from vcasgd.chaos.audited_job import counting_spec
from vcasgd.spec.access import Scope
from vcasgd.stack import StackHome, StackState

#: Seconds of the attack.
ATTACK_SECONDS = 600.0
#: Seconds in which every page and every route must answer meanwhile.
ANSWER_SECONDS = 2.0
#: Memory of a part that no attacker may make it exceed, in bytes; the largest has about 300 MB.
MAX_RESIDENT = 1 << 30
#: Epochs of the job: more than it trains in the time of the attack.
EPOCHS = 40


@pytest.fixture
def volunteers(tmp_path: Path) -> Iterator[Volunteers]:
    with joinable_stack(tmp_path) as volunteers:
        yield volunteers


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(2400)
def test_attackers_stop_neither_a_job_nor_a_page(volunteers: Volunteers, tmp_path: Path) -> None:
    # Given a job that trains on a machine that joined
    job = CountedJob(volunteers.client, tmp_path, EPOCHS)
    with volunteers.machine(volunteers.token("honest"), "--share", str(tmp_path)) as machine:
        await_truth(lambda: job.updates() > 3)

        # When attackers with each kind of credential do what they can
        file = tmp_path / "attack.json"
        file.write_text(json.dumps(plan_of(volunteers, machine.name())))
        paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        argv = [sys.executable, "-m", "support.attackers", str(file)]
        attackers = Process(argv, tmp_path / "attackers.log", {"PYTHONPATH": paths})
        try:
            before = job.updates()
            slowest = ask_everything(volunteers, job.id, time.monotonic() + ATTACK_SECONDS)
            assert job.updates() > before + 10, "the job continued"
            assert attackers.terminate() == 0
        finally:
            attackers.end()
            sys.stdout.write((tmp_path / "attackers.log").read_text())

        # Then each attacked to the end, every page answered in time, and no part restarted or grew
        did = json.loads(file.with_suffix(".did").read_text())
        sys.stdout.write(f"{json.dumps(did)}\nslowest answers: {slowest}\n")
        assert set(did) == set(ATTACKERS)
        assert min(sum(counts.values()) for counts in did.values()) > 100
        assert slowest[0][0] < ANSWER_SECONDS, slowest
        state = StackState.read(volunteers.settings.home_path)
        assert {name: part.restarts for name, part in state.parts.items() if part.restarts} == {}
        assert resident(state) == {}

        job.finish()
        assert machine.process.terminate() == 0


def plan_of(volunteers: Volunteers, machine: str) -> dict[str, Any]:
    client, home = volunteers.client, StackHome(volunteers.settings.home_path)
    urls = [server_url(home, name) for name in ("ledger", "tensors")]
    tokens = {
        scope.value: client.create_token(f"evil-{scope.value}", scope).token
        for scope in (Scope.READ, Scope.SUBMIT)
    }
    tokens["join"] = volunteers.token("evil-join").partition(".")[0]
    hostile = client.submit_directory(counting_spec(2).model_copy(update={"name": "hostile"}))
    return {
        "api": volunteers.state.api_url,
        "gateway": f"https://127.0.0.1:{volunteers.port}",
        "tokens": tokens,
        "machine": machine,
        "version": vcasgd.__version__,
        "job": hostile.id,
        "worker": worker_credentials(*urls, home.ensure_password("jobs"), hostile.id, Hostile.name),
    }


def ask_everything(volunteers: Volunteers, job: str, until: float) -> list[tuple[float, str]]:
    """Request every page and route that reads until a time; return the slowest answers."""
    token = StackHome(volunteers.settings.home_path).token()
    api = volunteers.state.api_url
    headers = {"Authorization": f"Bearer {token}"}
    answers: list[tuple[float, str]] = []
    with httpx.Client(base_url=api, headers=headers, timeout=30.0, trust_env=False) as http:
        routes = [path.replace("{job}", job) for path in (*PAGES, *readable(http))]
        while time.monotonic() < until:
            for url in routes:
                began = time.monotonic()
                with http.stream("GET", url) as answer:
                    assert answer.status_code < 500, f"{url}: {answer.status_code}"
                    next(answer.iter_raw(1), b"")
                answers.append((time.monotonic() - began, url))
            time.sleep(0.5)
    return sorted(answers, reverse=True)[:10]


def resident(state: StackState) -> dict[str, int]:
    """Return the parts that use too much memory, with their bytes."""
    sizes = {name: psutil.Process(part.pid).memory_info().rss for name, part in state.parts.items()}
    return {name: size for name, size in sizes.items() if size > MAX_RESIDENT}
