"""Real workers with their own ACL users train, and a rogue worker can't stop them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import Harness, Store
from support.hostile import SECRET, bounded, works
from support.servers import KINDS, TlsServer, require_binary
from support.training import Training
from support.waiting import await_truth
from xxhash import xxh3_64_intdigest

from vcasgd.errors import StoreDenied
from vcasgd.learning.encodings import Float32
from vcasgd.parameter_server.reports import REJECTIONS_BEFORE_QUARANTINE
from vcasgd.store.acl import (
    LEDGER_SCRIPTS,
    TENSORS_SCRIPTS,
    AclUsers,
    ledger_user,
    tensors_user,
)
from vcasgd.store.connection import RedisClient, connect
from vcasgd.store.keys import TensorKeys
from vcasgd.store.ledger.leases import Leases
from vcasgd.store.tensors.header import Header


@pytest.fixture(params=KINDS)
def harness(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Harness]:
    """Servers of each kind for one test."""
    with bounded(tmp_path, binary=require_binary(request.param)) as harness:
        yield harness


@pytest.fixture(scope="module", params=KINDS)
def shared(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Harness]:
    """Servers of each kind, a parameter server, and a job loop, which outlive a rogue."""
    home = tmp_path_factory.mktemp("shared")
    with bounded(home, binary=require_binary(request.param)) as harness:
        harness.start_job_loop()
        harness.start_servers()
        yield harness


def begin(harness: Harness, workers: int = 2, **fields: Any) -> Training:
    """Start the processes of a job, which trains."""
    training = Training(harness, **fields)
    harness.start_job_loop()
    harness.start_servers()
    training.add_workers(workers)
    return training


def users(server: Store) -> str:
    return " ".join(name.decode() for name in server.connection.execute_command("ACL", "USERS"))


def users_at(server: RedisClient) -> set[str]:
    return {row["user"] for row in server.client_list()} - {"default"}


class Rogue:
    """A process that misuses the credentials of one worker of a job that two others train."""

    def __init__(self, harness: Harness) -> None:
        self.harness, self.name = harness, "rogue"
        self.training = training = Training(harness, subtasks=8)
        self.honest, _ = training.add_workers(2)
        training.await_more_samples(training.interval)
        env = harness.credentials(training.job, self.name)
        self.keys = TensorKeys(training.job)
        self.ledger = connect(env["VCASGD_LEDGER_URL"])
        self.tensors = connect(env["VCASGD_TENSORS_URL"])
        self.key = env["VCASGD_WORKER_KEY"]
        self.layout = harness.layout(training.job)
        self._sent = 0
        # The parameter server admits it after its first heartbeat.
        leases = Leases(self.ledger, training.job, self.name, 10)
        await_truth(lambda: works(lambda: leases.renew({"at": 0.0}, [])))
        await_truth(lambda: works(lambda: self.tensors.get(self.keys.meta)))

    def rejected(self, reason: str) -> int:
        """Return how many updates of the job were rejected for a reason."""
        totals = self.harness.jobs.get(self.training.job).totals
        return int(totals.get("rejected", {}).get(reason, 0))

    def update(self, **changes: Any) -> tuple[Header, memoryview]:
        """Return an update of the job's last subtask with a wrong checksum."""
        self._sent += 1
        payload = Float32().encode(torch.ones(self.layout.floats))
        fields = {
            "update": f"{changes.get('worker', self.name)}.666.{self._sent}",
            "worker": self.name,
            "subtask": self.training.plan.total_subtasks - 1,
            "start": 0,
            "stop": self.training.interval,
            "base": 0,
            "token": 0,
            "codec": "float32",
            "size": len(payload),
            "checksum": xxh3_64_intdigest(payload) ^ 1,
            "layout": self.layout.digest(),
        }
        return Header(**{**fields, **changes}), payload

    def inject(self, header: bytes) -> None:
        self.tensors.xadd(self.keys.stream, {"h": header})


@pytest.mark.ci
def test_a_job_is_trained_from_its_first_snapshot_to_its_end(harness: Harness) -> None:
    # Given servers that still have the users of a job that has ended
    over = "over-23abcd"
    AclUsers(harness.ledger.connection, LEDGER_SCRIPTS, 0).sync([ledger_user(SECRET, over)])
    worker = tensors_user(SECRET, over, f"{over}.w")
    AclUsers(harness.tensors.connection, TENSORS_SCRIPTS, 0).sync([worker])
    servers = (harness.ledger, harness.tensors)
    assert all(over in users(server) for server in servers)

    # When another job is trained
    training = begin(harness)

    # Then all its processes use users of their own, and only those of the ended job are removed
    expected = {f"vcasgd-job-{training.job}"}
    expected |= {f"vcasgd-job-{training.job}/{name}" for name in harness.workers}
    seen: set[str] = set()

    def signed_in() -> bool:
        seen.update(*(users_at(server.connection) for server in servers))
        return seen == expected

    await_truth(signed_in)
    await_truth(lambda: not any(over in users(server) for server in servers))
    training.await_success()


@pytest.mark.ci
def test_restarted_servers_get_their_users_again(harness: Harness) -> None:
    training = begin(harness, samples=800)
    for server in (harness.tensors, harness.ledger):
        training.await_more_samples(training.interval)
        server.kill()
        server.start()
        training.await_more_samples(training.interval)
        # A report is lost with the process that has not sent it yet.
        await_truth(lambda: harness.events(training.job, "republished"))

    # Also if the parameter server, which knew them, restarts, too
    harness.server.kill()
    harness.tensors.kill()
    harness.tensors.start()
    harness.start_server()
    training.await_success()


@pytest.mark.ci
def test_a_shard_whose_model_is_lost_starts_again_beside_one_that_has_it(tmp_path: Path) -> None:
    with bounded(tmp_path, nodes=2) as harness:
        training = begin(harness)
        training.await_samples(1, shard=1)

        for process in (harness.nodes[1], harness.servers[1]):
            process.kill()
        harness.nodes[1].start()
        harness.start_server(1)

        # Then workers make its first snapshot again, which they may not do for the other one
        await_truth(lambda: harness.events(training.job, "restarted"))
        training.await_success()


@pytest.fixture
def rogue(shared: Harness) -> Rogue:
    return Rogue(shared)


@pytest.mark.ci
def test_no_worker_is_blamed_for_another_ones_updates(rogue: Rogue) -> None:
    for _ in range(2 * REJECTIONS_BEFORE_QUARANTINE):
        header, _ = rogue.update(worker=rogue.honest)
        rogue.inject(header.signed("a key of its own", rogue.keys).model_dump_json().encode())
        rogue.inject(header.model_dump_json().encode())

    await_truth(lambda: rogue.rejected("signature") == 4 * REJECTIONS_BEFORE_QUARANTINE)
    assert rogue.harness.jobs.workers.quarantined(rogue.training.job) == {}
    rogue.training.await_success()
    assert rogue.training.unexplained_repeats() == 0


def test_a_rogue_worker_is_quarantined_under_its_own_name(rogue: Rogue) -> None:
    harness, training = rogue.harness, rogue.training
    for _ in range(REJECTIONS_BEFORE_QUARANTINE):
        header, payload = rogue.update()
        rogue.tensors.set(rogue.keys.payload_chunk(header.update, 0), bytes(payload))
        rogue.inject(header.signed(rogue.key, rogue.keys).model_dump_json().encode())

    await_truth(lambda: "rogue" in harness.jobs.workers.quarantined(training.job))
    await_truth(lambda: not works(lambda: rogue.tensors.get(rogue.keys.meta)))
    with pytest.raises(StoreDenied):
        rogue.tensors.get(rogue.keys.meta)
    assert len(harness.events(training.job, "worker-quarantined")) == 1
    training.await_success()
    assert harness.jobs.workers.quarantined(training.job).keys() == {"rogue"}


def test_a_flood_of_garbage_does_not_stop_training(rogue: Rogue) -> None:
    for number in range(1000):
        rogue.inject(b"{" * (number % 50) + b"\xff")

    rogue.training.await_success()
    await_truth(lambda: rogue.rejected("header") == 1000)
    events = rogue.harness.events(rogue.training.job, "update-rejected")
    assert len(events) < 20, "the history is kept"
    assert rogue.training.unexplained_repeats() == 0


def test_a_worker_that_no_server_admits_gives_up_with_a_reason(tmp_path: Path) -> None:
    # Given servers without a controller and a parameter server, which would create its users
    with bounded(tmp_path, heartbeat=0.02) as harness:
        training = Training(harness)
        name = harness.start_worker(training.job)

        harness.workers[name].wait()

        log = (tmp_path / f"{name}.log").read_text()
        assert "the store refused" in log
        assert ledger_user(SECRET, training.job).password not in log
        assert harness.jobs.workers.heartbeats(training.job) == {}


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_a_job_is_trained_over_tls(tmp_path: Path, nodes: int) -> None:
    # Given servers that each have their own certificate authority
    with bounded(tmp_path, binary=require_binary("redis"), nodes=nodes) as harness:
        for variable, servers in (
            ("VCASGD_LEDGER_URL", [harness.ledger]),
            ("VCASGD_TENSORS_URL", harness.nodes),
        ):
            tls = [TlsServer(server, tmp_path) for server in servers]
            urls = [each.url(ssl_ca_certs=each.authority) for each in tls]
            harness.env[variable] = " ".join(urls)
        begin(harness).await_success()
