"""Replica of a tensors server in a cluster of a cloud: the machines' own scripts and configuration.

Each machine has a loopback address of its own, so real servers and Sentinels use the real ports.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import redis
from support.children import Process
from support.fake_google import FakeGoogle, GoogleMachine
from support.machine_roots import INFRA
from support.servers import require_binary
from support.waiting import PATIENCE, await_truth

from vcasgd.errors import StoreUnavailable
from vcasgd.store.connection import RedisClient, check_server, connect, patiently
from vcasgd.store.embedded import replication_lines
from vcasgd.store.role_at_start import primary_at_start
from vcasgd.store.sentinel import named_primary

CONTROL, STORE, REPLICA = "127.0.0.10", "127.0.0.20", "127.0.0.100"
ROLES = {CONTROL: "control-plane", STORE: "store", REPLICA: "replica"}
ADDRESSES = f"CONTROL_HOST={CONTROL} STORE_HOSTS={STORE} REPLICA_HOSTS={REPLICA} NODE=0\n"
LEDGER = f"LEDGER_URL='redis://:PASSWORD@{CONTROL}:6379/0'\n"
TLS = f"TLS_SUBJECT='{','.join(f'IP:{host}' for host in ROLES)}'\n"
#: Milliseconds without an answer until a server counts as down: while none may, and while one is
#: dead; on real machines it is between these.
STEADY_MS, DOWN_MS = 600_000, 700


class StoreMachines:
    """Control plane, store node, and replica, with the processes that their units run."""

    def __init__(self, folder: Path, google: FakeGoogle, more: str) -> None:
        require_binary("redis")
        self._google = google
        self._processes: dict[tuple[str, str], Process] = {}
        self.machines = {}
        for host, role in ROLES.items():
            settings = f"{ADDRESSES}{LEDGER}ADDRESS={host}\n{more}"
            machine = GoogleMachine(folder / role, google, role, more=settings)
            done = machine.run("secrets")
            assert done.returncode == 0, done.stderr
            self.machines[host] = machine
            self._prepare(host, machine.root)

    def _prepare(self, host: str, root: Path) -> None:
        """Write what cloud-init, systemd, and pip would, and keep to this machine's address."""
        (root / "var/lib/vcasgd/sentinel").mkdir(parents=True)
        (root / "etc/vcasgd/replication.conf").write_text(
            (INFRA / "redis/replication.conf").read_text()
        )
        text = (INFRA / "redis/tensors.conf").read_text().replace("/var/lib/vcasgd", str(root))
        text = text.replace("/run/vcasgd-tensors", str(root))
        text = text.replace("/run/vcasgd/", f"{root}/run/vcasgd/")
        tensors = root / "etc/vcasgd/tensors.conf"
        tensors.write_text(text.replace("bind * -::*", f"bind {host}"))
        sentinel = root / "run/vcasgd/sentinel.conf"
        text = sentinel.read_text().replace("bind * -::*", f"bind {host}")
        sentinel.write_text(
            text.replace("milliseconds tensors-0 5000", f"milliseconds tensors-0 {STEADY_MS}")
        )
        python = root / "opt/vcasgd/venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    @property
    def url(self) -> str:
        return self._url(self.machines[CONTROL])

    def _url(self, machine: GoogleMachine) -> str:
        return machine.secrets()["VCASGD_TENSORS_URL"].replace(
            "=/etc/vcasgd", f"={machine.root}/etc/vcasgd"
        )

    def start(self, host: str, script: str, promotion_seconds: float | None = None) -> Process:
        """Start one of the scripts that units run."""
        machine = self.machines[host]
        environment = {
            **machine.environment,
            "VCASGD_TENSORS_URL": self._url(machine),
            "PATH": f"{os.environ['PATH']}{os.pathsep}/usr/bin",
        }
        if promotion_seconds is not None:
            environment["PROMOTION_SECONDS"] = str(promotion_seconds)
        program = machine.root / "usr/local/lib/vcasgd" / script
        process = Process([str(program)], machine.root / f"{script}.log", environment)
        self._processes[host, script] = process
        return process

    def start_all(self) -> None:
        for host in ROLES:
            self.start(host, "sentinel")
        # Nothing can be promoted at the first start.
        self.start(STORE, "tensors", promotion_seconds=0.5)
        self.start(REPLICA, "tensors", promotion_seconds=0.5)

    def notice_after(self, milliseconds: int) -> None:
        """Tell each Sentinel after how long a server counts as down."""
        for host, machine in self.machines.items():
            text = (machine.root / "run/vcasgd/sentinel.conf").read_text()
            (password,) = re.findall(r"^requirepass (\S+)$", text, re.MULTILINE)
            own = {"username": "default", "password": password}
            with closing(client_of_sentinel(self, host, **own)) as sentinel:
                words = f"SENTINEL SET tensors-0 down-after-milliseconds {milliseconds}"
                sentinel.execute_command(*words.split())

    def kill(self, host: str, script: str) -> None:
        process = self._processes[host, script]
        assert process.alive, f"the fault did not fire: {script} of {host} was dead already"
        process.kill()

    def end(self) -> None:
        for process in self._processes.values():
            process.end()


@pytest.fixture(
    params=[pytest.param("", id="plain", marks=pytest.mark.extended), pytest.param(TLS, id="tls")]
)
def machines(
    request: pytest.FixtureRequest, google: FakeGoogle, tmp_path: Path
) -> Iterator[StoreMachines]:
    machines = StoreMachines(tmp_path, google, request.param)
    try:
        yield machines
    finally:
        machines.end()


def is_written(client: RedisClient, value: str) -> bool:
    try:
        client.set("a key", value)
    except StoreUnavailable:
        return False
    return client.replicated


def knows_the_replica(client: redis.Redis) -> bool:
    state = client.sentinel_master("tensors-0")
    return (int(state["num-slaves"]), int(state["num-other-sentinels"])) == (1, 2)


@pytest.mark.ci
def test_replica_takes_over_and_the_dead_primary_comes_back_as_its_replica(
    machines: StoreMachines,
) -> None:
    # Given a store node with a replica, and a client with the URL that all machines have
    machines.start_all()
    client = connect(machines.url)
    await_truth(lambda: is_written(client, "before"))
    check_server(client, "tensors")
    # One that doesn't know the replica would not promote it.
    for host in ROLES:
        with closing(client_of_sentinel(machines, host)) as sentinel:
            await_truth(partial(knows_the_replica, sentinel))
    asked = client_of_sentinel(machines)
    await_truth(lambda: named_primary(machines.url) == (STORE, 6380))
    # When the primary is killed, and systemd starts it again at once
    machines.notice_after(DOWN_MS)
    machines.kill(STORE, "tensors")
    machines.start(STORE, "tensors", promotion_seconds=PATIENCE)
    # Then the replica takes over with everything that was acknowledged, and the client goes on
    assert patiently(lambda: client.get("a key"), PATIENCE) == b"before"
    await_truth(lambda: named_primary(machines.url) == (REPLICA, 6380))
    machines.notice_after(STEADY_MS)
    # And the dead server comes back as a replica, and has what is written now
    await_truth(lambda: is_written(client, "after"))
    # And a Sentinel that is started again remembers it
    machines.kill(CONTROL, "sentinel")
    machines.start(CONTROL, "sentinel")
    await_truth(lambda: promoted(asked))
    # And the new primary would wait only so long for a promotion
    own, first = (REPLICA, 6380), (STORE, 6380)
    await_truth(lambda: primary_at_start(machines.url, own, first, seconds=0.1) == own)
    # And clients can only ask
    for command in ("REMOVE tensors-0", "FAILOVER tensors-0", "SET tensors-0 quorum 1"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            asked.execute_command(*f"SENTINEL {command}".split())
    asked.close()
    client.close()


def client_of_sentinel(
    machines: StoreMachines,
    host: str = CONTROL,
    username: str | None = None,
    password: str | None = None,
) -> redis.Redis:
    """Return a connection to a machine's Sentinel, by default as the user in the URL."""
    options = dict(pair.split("=", 1) for pair in machines.url.partition("?")[2].split("&"))
    tls = {name: value for name, value in options.items() if name == "ssl_ca_certs"}
    return redis.Redis(
        host,
        26379,
        username=username or options["sentinel_username"],
        password=password or options["sentinel_password"],
        decode_responses=True,
        ssl=bool(tls),
        **tls,
    )


def promoted(asked: redis.Redis) -> bool:
    try:
        state = asked.sentinel_master("tensors-0")
    except redis.ConnectionError:
        return False
    return (state["ip"], int(state["port"])) == (REPLICA, 6380)


def test_replication_is_configured_as_in_a_local_stack() -> None:
    # Given what a local stack adds to a server with a replica, without its password
    wanted = set(replication_lines("a-password")) - {"masterauth a-password"}
    # Then the machines have the same, except that they train on without the replica
    wanted -= {"min-replicas-to-write 1", "min-replicas-max-lag 10"}
    text = (INFRA / "redis/replication.conf").read_text()
    assert {line for line in text.splitlines() if not line.startswith("#")} == wanted


def test_server_that_reaches_no_sentinel_starts_as_at_first() -> None:
    # Given Sentinels that don't answer
    url = f"redis+sentinel://:a-password@{CONTROL}:1,{STORE}:1,{REPLICA}:1/tensors-0/0"
    own, first = (REPLICA, 6380), (STORE, 6380)
    # When a server has waited for them, then its primary is the first one
    assert primary_at_start(url, own, first, seconds=0.1) == first
