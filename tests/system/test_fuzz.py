"""Every command and script that a worker may call, with random arguments, stops no other job.

Attacks on the servers themselves take a bounded part of their memory, and block none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.fuzzer import Fuzzer
from support.harness import Harness
from support.hostile import (
    Hostile,
    assert_everything_answers,
    platform,
    platform_api,
    train_on,
)
from support.servers import KINDS
from support.training import Training

from vcasgd.limits import MAX_ANSWER_BYTES

#: Calls in ``make test``, and in ``make test-all``.
CALLS, MANY_CALLS = 1000, 20_000
#: MiB of each server, and of all its connections.
MEMORY_MB, CLIENTS_MB = 256, 64
#: Seconds that no call may block a server, on a busy machine; most take milliseconds.
LONG = 2.0
#: Calls after which a job must have lost its access; most lose it before 1,500.
CALLS_OF_A_JOB = 30_000


@pytest.fixture(scope="module", params=KINDS)
def harness(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Harness]:
    with platform(tmp_path_factory.mktemp("fuzz"), request.param) as harness:
        for server in (harness.ledger.connection, harness.tensors.connection):
            server.config_set("maxmemory", f"{MEMORY_MB}mb")
            server.config_set("maxmemory-clients", f"{CLIENTS_MB}mb")
        yield harness


@pytest.fixture(autouse=True)
def _servers_are_never_blocked_or_full(harness: Harness) -> Iterator[None]:
    servers = [harness.ledger.connection, harness.tensors.connection]
    for server in servers:
        server.slowlog_reset()
        server.config_resetstat()
    yield
    for server in servers:
        slow = [(each["duration"] / 1e6, each["command"][:200]) for each in server.slowlog_get(128)]
        assert [each for each in slow if each[0] > LONG] == []
        # What runs may exceed the limit of data a little, and one answer that of connections.
        peak = server.info("memory")["used_memory_peak"]
        assert peak < (MEMORY_MB << 20) + 2 * MAX_ANSWER_BYTES


def hostile_job(harness: Harness, *, trains: bool) -> str:
    """Return a job that has no model yet or, with ``trains``, has one and is running.

    Scripts read more of what a worker writes if there is a model.
    """
    training = Training(harness)
    if trains:
        (name,) = training.add_workers(1)
        training.await_samples(1)
        training.worker(name).kill()
    return training.job


def fuzz(harness: Harness, calls: int, seed: int) -> None:
    api = platform_api(harness)
    chooser, made, accepted, jobs = random.Random(seed), 0, 0, []
    try:
        while made < calls:
            hostile = Hostile.of(harness, hostile_job(harness, trains=len(jobs) % 2 == 0))
            fuzzer, own = Fuzzer(hostile, chooser), 0
            while own < CALLS_OF_A_JOB and fuzzer.call():
                own += 1
            made, accepted = made + own, accepted + fuzzer.accepted
            assert hostile.await_expulsion().reason
            fuzzer.close()
            hostile.close()
            jobs.append(hostile.job)
        assert accepted > calls / 10, "most calls are refused"
        victim = Training(harness)
        victim.add_workers(1)
        assert_everything_answers(api, [*jobs[-3:], victim.job])
        train_on(harness, victim)
        assert_everything_answers(api, [victim.job])
    finally:
        api.end()


@pytest.mark.ci
def test_random_calls_of_a_worker_stop_no_other_job(harness: Harness) -> None:
    fuzz(harness, CALLS, seed=1)


@pytest.mark.extended
@pytest.mark.parametrize("seed", [2, 3])
def test_many_random_calls_of_a_worker_stop_no_other_job(harness: Harness, seed: int) -> None:
    fuzz(harness, MANY_CALLS, seed)
